"""Jobs of a toy stage."""

from tests.support.infra.launch.toy_jobs import jobs

__all__ = ["jobs"]
