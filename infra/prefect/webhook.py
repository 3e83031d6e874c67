"""Where alerts are posted to: an address that is a secret, since whoever knows it may post."""

import os

WEBHOOK = "NANOCHAT_WEBHOOK"


def configured_webhook() -> str | None:
    """NANOCHAT_WEBHOOK: the address that alerts are posted to, or None for no alerts."""
    return os.environ.get(WEBHOOK) or None
