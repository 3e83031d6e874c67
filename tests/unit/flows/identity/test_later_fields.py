"""Fields of the configuration that were added later keep the fingerprints from before them.

What an entry of the table does is tested with the sections, in test_section.py.
"""

import dataclasses
import hashlib
import json

from nanochat_core import config
from nanochat_core.section import NEUTRAL, Section, neutral_key

# Digests of the first entries of the table. Add a line for new entries; never change one: results
# of other settings would get the fingerprints of old ones.
FROZEN = {
    33: "2760c76c2068c39a",
    34: "6615a2b5aa2f4d19",
    35: "2496fa8b9b93eda5",
    36: "8db57fc00be4efca",
}


def test_the_table_has_each_field_with_a_default_and_no_other():
    kinds = [k for k in vars(config).values() if isinstance(k, type) and issubclass(k, Section)]
    later = [
        neutral_key(kind, field.name)
        for kind in kinds
        if kind not in (Section, config.RunConfig)  # stages declare parts of a run, not the run
        for field in dataclasses.fields(kind)
        if (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    ]
    assert sorted(NEUTRAL) == sorted(later)


def test_the_table_only_grows():
    entries = list(NEUTRAL.items())
    for count, digest in FROZEN.items():
        text = json.dumps(entries[:count])
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
