"""What training tells is the same to the last bit for code that computes the same, and else not.

That is what `nanochat accept --prove` stands on: no value that it compares may depend on a clock.
"""

from dataclasses import replace

import pytest

from flows.identity.fingerprint import Code, identify
from flows.plan.prove import prove
from flows.stages import stage_named
from nanochat_core.errors import ArtifactError
from tests.integration.flows.plan.test_prove import offer
from tests.support.flows.repository import commit_all, copy_packages, git
from tests.support.flows.shelf import make_manifest

pytestmark = pytest.mark.torch
Edit = tuple[str, str, str]  # module, old text, new text
CLEARER = ("nanochat_core/optim/muon.py", "polynomial", "of_gram")
# Too little for the losses of three steps to show.
OTHER = ("nanochat_core/optim/muon.py", "BETA2 = 0.9 ", "BETA2 = 0.9000001 ")


def copy_repository(tmp_path):
    """Return a copy of our packages under git, and its commit."""
    root = copy_packages(tmp_path / "repository")
    return root, commit_all(root)


def prove_edit(repository, stage, config, job, edit):
    root, commit = repository
    digests = {source.name: "0" * 64 for source in stage.inputs}
    old = identify(stage, config, digests, code=Code(root))
    name, before, after = edit
    path = root / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    commit_all(root)
    new = identify(stage, config, digests, code=Code(root))
    assert new.fingerprint != old.fingerprint
    made = make_manifest(stage.name, git_commit=commit)
    manifest = replace(made, fingerprint=old.fingerprint, preimage=old.preimage)
    return prove(
        offer(stage, new, manifest), job, processes=1, steps=3, root=root, log=lambda text: None
    )


def test_a_clearer_optimizer_is_proven_and_another_one_is_not(bench, tmp_path):
    repository = copy_repository(tmp_path)
    stage = stage_named("pretrain")
    long = {"num_steps": 5000}  # it would not end before it is stopped
    job = bench.job("pretrain", "equal", section=long)
    proof = prove_edit(repository, stage, bench.config, job, CLEARER)
    assert proof.compared > 3 + 1  # losses, the first evaluation; weights and optimizer
    job = bench.job("pretrain", "other", section=long)
    fixed = (repository[0], git(repository[0], "rev-parse", "HEAD"))
    with pytest.raises(ArtifactError, match=r"^checkpoint tensors"):
        prove_edit(fixed, stage, bench.config, job, OTHER)
