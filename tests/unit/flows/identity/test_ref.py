"""The keys of an artifact's objects. Stores of users hold them, so none may change."""

from flows.artifacts.pins import SWEEP
from flows.identity.ref import ArtifactRef

DIGITS = "0123456789ab" + "c" * 52
REF = ArtifactRef("sft", DIGITS)


def test_the_keys_of_an_artifact_stay_as_stores_have_them():
    under = f"sft/{DIGITS}"
    assert REF.name == "sft/0123456789ab"
    assert REF.prefix == under
    assert REF.manifest_key == f"{under}/manifest.json"
    assert REF.lease_key == f"{under}/lease.json"
    assert REF.revocation_key == f"{under}/revoked.json"
    assert REF.divergences_prefix == f"{under}/divergences"
    assert REF.files_prefix("a1") == f"{under}/files/a1"
    assert REF.logs_prefix("a1") == f"{under}/logs/a1"
    assert REF.checkpoints_prefix == f"{under}/checkpoints"
    assert REF.checkpoint_prefix(200) == f"{under}/checkpoints/step-0000200"
    assert REF.redo_key == f"{under}/redo.json"
    assert SWEEP.lease_key == "gc/sweep/lease.json"


def test_an_artifact_is_parsed_from_its_prefix_and_from_any_key_below_it():
    for key in (REF.prefix, REF.manifest_key, f"{REF.files_prefix('a1')}/model.safetensors"):
        assert ArtifactRef.parse(key) == REF
