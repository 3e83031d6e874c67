"""nanochat's checkpoints come in as they were saved, or are refused by name; what goes out is what
came in."""

import json
import zipfile

import pytest
import torch

from nanochat_core.config import ModelConfig
from nanochat_core.eras import ERAS
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.interop.nanochat_files import (
    find_kind,
    find_tokenizer,
    read_checkpoint,
    read_checkpoint_tokenizer,
    write_checkpoint,
    write_model,
)
from nanochat_core.interop.pickled_tokenizer import read_tokenizer, write_tokenizer
from nanochat_core.model.checkpoint import load_model
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.interop.models import Bomb, a_model, a_tokenizer

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

CPU = torch.device("cpu")
ALIKE = {"2026-01-17", "2026-03-02"}  # eras whose checkpoints look the same


LAST = "2026-03-14"


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def save(directory, model, weights=None, *, step=12, **changes):
    """Write a checkpoint as nanochat does, with other weights and settings if they are given."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(weights or weights_of(model), directory / f"model_{step:06d}.pt")
    shape = model.config
    config = {"sequence_len": shape.sequence_len, "vocab_size": shape.vocab_size}
    config |= {"n_layer": shape.depth, "n_head": shape.num_heads}
    config |= {"n_kv_head": shape.num_kv_heads, "n_embd": shape.width}
    if shape.residual_scalars:
        config["window_pattern"] = "SL"
    meta = {"step": step, "val_bpb": 0.9, "model_config": config | changes, "user_config": {}}
    (directory / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    return directory


def read(directory, era):
    return read_checkpoint(directory, era=era if era in ALIKE else None)


def write(directory, found):
    directory.mkdir()
    write_model(directory, found, a_tokenizer())
    return load_model(directory, CPU)


def unreadable(directory, message):
    with pytest.raises(ModelError, match=message) as caught:
        read_checkpoint(directory)
    return caught.value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("era", ERAS)
def test_a_checkpoint_of_every_era_comes_in_with_its_logits_and_goes_out_to_the_bit(
    tmp_path, era, precision
):
    model = a_model(era, precision=precision)
    before = weights_of(model)
    found = read(save(tmp_path / "in", model), era)
    assert (found.era, found.step, found.config) == (era, 12, model.config)
    read_back = write(tmp_path / "ours", found)
    tokens = torch.randint(300, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = model(tokens), read_back(tokens)
    assert expected.std() > 0.5
    assert torch.equal(got, expected)
    assert Tokenizer.load(tmp_path / "ours" / "tokenizer").digest() == a_tokenizer().digest()
    commit = write_checkpoint(tmp_path / "out", read_back, a_tokenizer(), step=12, extra={})
    assert ERAS[era].commit is None or commit == ERAS[era].commit
    after = torch.load(tmp_path / "out" / "model_000012.pt", weights_only=True)
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    again = read(tmp_path / "out", era)
    assert (again.era, again.config, again.numerics) == (era, found.config, found.numerics)
    tokenizer = find_tokenizer(tmp_path / "out")
    assert read_checkpoint_tokenizer(tokenizer, again.config).digest() == a_tokenizer().digest()


@pytest.mark.parametrize(
    ("era", "extra", "kind"),
    [
        ("2026-03-14", {"device_batch_size": 8, "val_bpb": 1.0}, "base"),
        ("2026-03-14", {"val_loss": 1.0}, "sft"),
        ("2026-03-14", {"val_bpb": 1.0}, "sft"),
        ("2026-01-05", {"val_bpb": 1.0}, "mid"),
        ("2026-03-14", {}, None),
    ],
)
def test_the_kind_is_read_from_what_each_script_records(tmp_path, era, extra, kind):
    write_checkpoint(tmp_path, a_model(era), a_tokenizer(), step=1, extra=extra)
    assert find_kind(tmp_path) == kind


def test_names_of_a_compiled_model_are_read_too(tmp_path):
    model = a_model(LAST)
    weights = {f"_orig_mod.{name}": tensor for name, tensor in weights_of(model).items()}
    save(tmp_path, model, weights)
    assert read_checkpoint(tmp_path).weights.keys() == model.state_dict().keys()


def test_the_last_step_is_taken_unless_one_is_named(tmp_path):
    model = a_model(LAST)
    for step in (5, 1000000, 20):
        save(tmp_path, model, step=step)
    assert read_checkpoint(tmp_path).step == 1000000
    assert read_checkpoint(tmp_path, step=5).step == 5
    with pytest.raises(ModelError, match="no checkpoint of step 6") as caught:
        read_checkpoint(tmp_path, step=6)
    assert caught.value.hint == "it has: 5, 20, 1000000"


def test_two_eras_that_look_alike_are_asked_for(tmp_path):
    save(tmp_path, a_model("2026-03-02"))
    with pytest.raises(ConfigError, match=r"softcap 15.*softcap 20"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="not of era 2026-03-14"):
        read_checkpoint(tmp_path, era="2026-03-14")
    with pytest.raises(ConfigError, match="no era 'spring'"):
        read_checkpoint(tmp_path, era="spring")


def test_a_checkpoint_that_would_run_code_runs_nothing(tmp_path):
    model = a_model(LAST)
    save(tmp_path, model, weights_of(model) | {"x": Bomb(tmp_path / "ran")})
    error = unreadable(tmp_path, "is not a checkpoint")
    assert "nothing of it was executed" in str(error.hint)
    assert not (tmp_path / "ran").exists()


DAMAGE = {  # how a tensor is changed
    "narrower": lambda t: t[:, :-1].contiguous(),
    "fp16": lambda t: t.half(),
    "int": lambda t: t.int(),
    "nan": lambda t: torch.full_like(t, float("nan")),
    "infinite in a row": lambda t: t.index_fill(0, torch.tensor([1]), float("inf")),
    "spread": lambda t: t[:1, :1].expand(t.shape),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)]),
    "text": lambda t: "not a tensor",
}
GATE = "transformer.h.1.attn.ve_gate.weight"
FOREIGN = [  # a tensor that no model of its kind has, and its shape
    *(("adapter.weight", (2,)), ("bigram_embed.weight", (8, 64))),
    *((GATE, shape) for shape in ((), (12,), (2, 12, 1))),
]
LIES = [
    *({"n_layer": 10**9}, {"n_layer": 5}, {"n_layer": True}, {"n_embd": 2**19}, {"n_embd": "64"}),
    *({"n_head": 3}, {"n_head": 64}, {"n_kv_head": 3}, {"n_kv_head": 4}, {"vocab_size": 2**20}),
    *({"sequence_len": 0}, {"sequence_len": None}),
    *({"window_pattern": pattern} for pattern in ("SX", "", 7, "S" * 10**6)),
]


def test_damaged_and_foreign_tensors_and_a_config_that_lies_are_named(tmp_path, transcript):
    model = a_model(LAST)
    weights = weights_of(model)

    def refused(head, weights, **changes):
        save(tmp_path, model, weights, **changes)
        transcript.refused(head, ModelError, read_checkpoint, tmp_path)

    for name in ("transformer.h.2.mlp.c_fc.weight", "lm_head.weight"):
        refused(f"{name} missing", {key: weights[key] for key in weights if key != name})
        for damage, change in DAMAGE.items():
            refused(f"{name} {damage}", {**weights, name: change(weights[name])})
    for name, shape in FOREIGN:
        refused(f"{name} {shape}", {**weights, name: torch.ones(shape)})
    for changes in LIES:
        refused(str(changes)[:60], weights, **changes)


def test_embeddings_of_two_precisions_are_not_rounded_silently(tmp_path):
    model = a_model(LAST, precision="bf16")
    weights = weights_of(model)
    weights["value_embeds.1.weight"] = weights["value_embeds.1.weight"].float()
    unreadable(save(tmp_path, model, weights), r"value_embeds\.1\.weight is fp32 next to bf16")


def test_matrices_in_bf16_come_in_with_their_values(tmp_path):
    model = a_model(LAST, precision="bf16")
    weights = {name: tensor.bfloat16() for name, tensor in weights_of(model).items()}
    found = read_checkpoint(save(tmp_path / "in", model, weights))
    state = write(tmp_path / "out", found).state_dict()
    assert all(torch.equal(state[name].bfloat16(), tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_archive_is_refused(tmp_path, share):
    path = save(tmp_path, a_model(LAST)) / "model_000012.pt"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    unreadable(tmp_path, "is not a checkpoint")


def test_a_pointer_of_git_lfs_says_how_to_get_the_file(tmp_path):
    save(tmp_path, a_model(LAST))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for name in ("model_000012.pt", "tokenizer.pkl"):
        (tmp_path / name).write_text(pointer)
    for call, path in ((read_checkpoint, tmp_path), (read_tokenizer, tmp_path / "tokenizer.pkl")):
        with pytest.raises(ModelError, match="is a pointer of Git LFS") as error:
            call(path)
        assert error.value.hint == "get the file: git lfs pull"


def test_an_archive_that_was_compressed_is_refused(tmp_path):
    path = save(tmp_path, a_model(LAST)) / "model_000012.pt"
    with zipfile.ZipFile(path) as archive:
        parts = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    unreadable(tmp_path, "compressed")


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"model_config": 3}', "[" * 100_000])
def test_a_meta_file_that_describes_nothing_is_refused(tmp_path, text):
    (save(tmp_path, a_model(LAST)) / "meta_000012.json").write_text(text)
    unreadable(tmp_path, "does not describe a model")


def test_what_is_not_there_is_said(tmp_path):
    unreadable(tmp_path, r"has no model_\*\.pt")
    unreadable(tmp_path / "nowhere", "no such file")
    (tmp_path / "model_000001.pt").write_bytes(b"x")
    unreadable(tmp_path, r"meta_000001\.json cannot be read")


def test_the_tokenizer_is_found_where_nanochat_keeps_it(tmp_path):
    checkpoint = tmp_path / "base_checkpoints" / "d4"
    checkpoint.mkdir(parents=True)
    assert find_tokenizer(checkpoint) is None
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(a_tokenizer(), tmp_path / "tokenizer" / "tokenizer.pkl")
    assert find_tokenizer(checkpoint) == tmp_path / "tokenizer" / "tokenizer.pkl"
    write_tokenizer(a_tokenizer(), checkpoint / "tokenizer.pkl")
    assert find_tokenizer(checkpoint) == checkpoint / "tokenizer.pkl"


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    write_tokenizer(a_tokenizer(), tmp_path / "tokenizer.pkl")
    model = a_model(LAST)
    other = ModelConfig(**{**vars(model.config), "vocab_size": 301})
    with pytest.raises(ModelError, match="the tokenizer has 300 tokens, the model has 301"):
        read_checkpoint_tokenizer(tmp_path / "tokenizer.pkl", other)
