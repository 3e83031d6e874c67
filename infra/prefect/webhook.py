"""The address that alerts are posted to. It is a secret: a client that knows it may post."""

import os

WEBHOOK = "NANOCHAT_WEBHOOK"


def configured_webhook() -> str | None:
    """Return NANOCHAT_WEBHOOK, the address that alerts are posted to, or None for no alerts."""
    return os.environ.get(WEBHOOK) or None
