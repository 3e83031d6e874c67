"""Options of the machine on the command line arrive in the placement."""

import importlib.metadata
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli.options import PlacementOptions, RunOptions, check_workers
from flows.cli.requests import read_request
from flows.profiles import make_placement, open_profile
from flows.run_request import RunRequest
from infra.placement import missing_packages
from nanochat_core.errors import ConfigError


def place(options, profile="tiny"):
    """Return the placement that a command with these options uses, after its warnings."""
    found = make_placement(
        open_profile(profile).pace,
        home=options.home_path,
        gpus=options.gpus,
        settings=options.place_settings,
    )
    options.warn_of(found)
    return found


def test_options_of_the_machine_change_the_placement(tmp_path):
    where = PlacementOptions(
        home=tmp_path,
        gpus=0,
        device_batch_size=3,
        attention="sdpa",
        compile=False,
        place=("save_every_steps=50", "dollars_per_hour=24"),
    )
    placement = place(where)
    seen = placement.resources
    assert (seen.device_batch_size, seen.attention, seen.compile) == (3, "sdpa", False)
    assert (seen.save_every_steps, seen.dollars_per_hour) == (50, 24.0)
    words = where.argv
    pairs = list(zip(words[::2], words[1::2], strict=True))
    assert ("--gpus", "0") in pairs
    settings = tuple(value for name, value in pairs if name == "--place")
    again = PlacementOptions(home=tmp_path, gpus=0, place=settings)
    assert place(again) == placement


def test_kernels_are_compiled_on_a_gpu_only(tmp_path, capsys):
    assert place(PlacementOptions(home=tmp_path, gpus=8), "d12").resources.compile
    assert not place(PlacementOptions(home=tmp_path, gpus=0), "d12").resources.compile
    where = PlacementOptions(home=tmp_path, gpus=8, compile=False)
    assert not place(where, "d12").resources.compile
    where = PlacementOptions(home=tmp_path, gpus=1, compile=True)
    assert place(where).resources.compile
    assert capsys.readouterr().err == ""
    for asked, setting in (
        (PlacementOptions(compile=True), "compile=true"),
        (PlacementOptions(place=("compile=true",)), "compile=true"),
        (PlacementOptions(place=("compile=blocks",)), "compile=blocks"),
    ):
        where = replace(asked, home=tmp_path, gpus=0)
        assert not place(where, "d12").resources.compile
        assert capsys.readouterr().err.startswith(f"warning: {setting} counts on a GPU only: ")


def test_sinks_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_SINKS", "wandb,trackio")
    assert place(PlacementOptions(home=tmp_path, gpus=0)).resources.sinks == ("wandb", "trackio")


def test_a_package_that_is_missing_is_named_before_the_first_stage(tmp_path, capsys):
    where = PlacementOptions(home=tmp_path, gpus=0, attention="fa3", place=("sinks=wandb",))
    place(where)
    said = capsys.readouterr().err
    assert "fa3 needs the package flash_attn_interface, which is not installed here: " in said
    if not importlib.util.find_spec("wandb"):
        assert "wandb needs the package wandb" in said
        assert "pip install 'nanochat-flows[trackers]'" in said
    place(PlacementOptions(home=tmp_path, gpus=0, attention="sdpa"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("installed", "missing"), [("flash-attn", "fa4"), ("flash-attn-4", "fa2")])
def test_flash_attention_2_and_4_share_a_folder_and_are_distinguished_by_their_packages(
    monkeypatch, installed, missing
):
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda *, name: [name] if name == installed else []
    )
    ((line, remedy),) = missing_packages(["fa2", "fa4"])
    assert line.startswith(f"{missing} needs the package flash-attn")
    assert remedy.startswith("pip install 'nanochat-flows[f")


def test_options_are_named_again_in_the_command_that_resumes():
    assert RunOptions().argv == []
    given = RunOptions(
        pool="gpu", nodes=2, retries=0, depth=4, until="sft", compile=False, strict=True
    )
    check_workers(given)
    words = "--depth 4 --until sft --pool gpu --nodes 2 --place compile=false --retries 0"
    assert given.argv == [*words.split(), "--strict"]


def test_what_cannot_be_together_is_refused(transcript, tmp_path):
    for given in ({"nodes": 2}, {"pool": "a b"}, {"pool": "cpu"}):
        transcript.refused(str(given), ConfigError, check_workers, RunRequest(**given))
    where = PlacementOptions(
        home=tmp_path, gpus=0, device_batch_size=4, place=("device_batch_size=8",)
    )
    transcript.refused("device_batch_size", ConfigError, place, where)


def test_text_on_the_command_line_may_be_a_relative_path():
    request = read_request("tiny", RunOptions(data="letters", steps=9))
    settings = (f"shards.path={Path.cwd() / 'letters'}", "shards.source=local")
    assert request.overrides == ("pretrain.num_steps=9", *settings)
    with pytest.raises(ConfigError, match="the address of a text is empty"):
        read_request("tiny", RunOptions(data=""))  # of an unset variable of the shell
