"""Upload an exported model to the Hugging Face Hub, through huggingface_hub.

The client reads HF_ENDPOINT and HF_TOKEN. Files that the Hub has are not sent again, and the
repository changes in one commit at the end: after an interruption the same command resumes.
"""

import re
from pathlib import Path

from nanochat_core.errors import StoreError

_NAME = re.compile(r"[\w][\w.-]{0,95}/[\w][\w.-]{0,95}")


def check_repository(name: str) -> str:
    """Return `name` if it is a valid repository name, else raise StoreError.

    For a check before the export, which may take long.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"'{name}' is not the name of a repository", hint="ORG/NAME, such as me/my-chat"
        )
    return name


def push_folder(folder: Path, repository: str, *, private: bool) -> str:
    """Commit every file of `folder` to `main` of a model repository, created if it does not exist.

    `private` applies to a repository that is created; an existing one keeps its visibility.

    Returns the URL of the commit. Raises StoreError if the Hub refuses or does not respond.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    check_repository(repository)
    hub = HfApi()
    try:
        hub.create_repo(repository, repo_type="model", private=private, exist_ok=True)
        done = hub.upload_folder(
            repo_id=repository,
            repo_type="model",
            folder_path=folder,
            commit_message="A model trained by nanochat-flows",
        )
    # The client raises all of these: connections, HTTP errors, its upload threads, bad responses.
    except (OSError, HTTPError, RuntimeError, ValueError, KeyError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        where, why = constants.ENDPOINT, str(error).strip().partition("\n")[0]
        if status in (401, 403):
            raise StoreError(
                f"{where} does not let you write to {repository} (status {status})",
                hint="set HF_TOKEN to a token that may, or name a repository of your own",
            ) from error
        raise StoreError(
            f"{repository} cannot be uploaded to {where}: {why}",
            hint=f"the files are in {folder}; to retry, run the same command with another DIR, "
            "since an export overwrites none",
        ) from error
    return done.commit_url
