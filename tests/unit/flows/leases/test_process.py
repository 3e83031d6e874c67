"""A process is called dead only if that is known: a wrong answer takes its lease from it."""

import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest

from flows.leases import process
from flows.leases.process import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux names a boot")


def test_another_process_with_its_number_is_not_it():
    me = Process.this()
    assert not me.is_dead()
    assert me.start is not None
    assert replace(me, start=me.start - 1).is_dead()


GONE = {"pid": 2**22 + 1}


@pytest.mark.parametrize(
    ("fields", "is_dead"),
    [
        (GONE, True),
        (GONE | {"namespace": "pid:[1]"}, False),  # a container, perhaps in another one's number
        (GONE | {"namespace": None}, False),
        (GONE | {"boot": None}, False),
        (GONE | {"boot": "before"}, True),  # this machine was started again
        ({"boot": "before"}, True),
        (GONE | {"boot": "before", "host": "far"}, False),
        (GONE | {"boot": "before", "machine": "far"}, False),  # another one with this host name
        (GONE | {"boot": "before", "machine": None}, False),
        (
            GONE | {"boot": "before", "namespace": "pid:[1]"},
            False,
        ),  # a container's host and machine
    ],
)
def test_what_is_known_of_a_process_by_its_name(monkeypatch, fields, is_dead):
    monkeypatch.setattr(process, "_read", lambda path: "machine")
    monkeypatch.setattr(process, "FIRST_NAMESPACE", Process.this().namespace)
    assert replace(Process.this(), **fields).is_dead() == is_dead  # type: ignore[arg-type]


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_process_of_another_user_is_not_called_dead_while_it_lives(monkeypatch, is_shown):
    me = Process.this()
    monkeypatch.setattr("os.kill", Mock(side_effect=PermissionError))
    if not is_shown:  # /proc is mounted with hidepid
        monkeypatch.setattr(process, "read_stat", lambda pid: None)
    assert not me.is_dead()


def test_without_an_id_the_host_name_alone_says_nothing(monkeypatch):
    monkeypatch.setattr(process, "_read", lambda path: None)
    assert not replace(Process.this(), boot="before").is_dead()


def test_where_no_boot_has_a_name_nothing_is_known(monkeypatch):
    gone = replace(Process.this(), **GONE)  # type: ignore[arg-type]
    monkeypatch.setattr(process, "boot_id", lambda: None)
    assert not gone.is_dead()
    assert not replace(gone, boot=None).is_dead()


def test_where_proc_is_that_of_another_namespace_nothing_is_known(monkeypatch):
    monkeypatch.setattr(process, "pid_namespace", lambda: None)
    gone = replace(Process.this(), **GONE)  # type: ignore[arg-type]
    assert not gone.is_dead()
