"""Image and compose stack: who runs in them, what is open, how they end, what they name."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.infra.deployed import INFRA, MIN_GRACE, SECRET, UID, leaves, mistake

HERE = INFRA / "containers"
DOCKERFILE = (HERE / "Dockerfile").read_text().replace("\\\n", " ")
ENV_EXAMPLE = (HERE / "stack.env.example").read_text()
TARGETS = ("cpu", "gpu")


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((HERE / name).read_text())


SERVICES: dict[str, Any] = compose()["services"]
WORKERS = [name for name in SERVICES if name.startswith("worker")]


def instructions(target: str) -> list[tuple[str, str]]:
    """The lines of one target, as (instruction, rest)."""
    stages = re.split(r"(?m)^FROM ", DOCKERFILE)
    body = next(s for s in stages if s.splitlines()[0].endswith(f" AS {target}"))
    lines = [line for line in body.splitlines()[1:] if re.match(r"[A-Z]+ ", line)]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def last(target: str, instruction: str) -> str:
    return [rest for word, rest in instructions(target) if word == instruction][-1]


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_runs_as_a_user_of_its_own_who_is_not_root(target: str) -> None:
    assert last(target, "USER") == f"{UID}:{UID}"
    assert f"useradd --uid {UID}" in DOCKERFILE
    after = [word for word, _ in instructions(target)]
    assert "RUN" not in after[after.index("USER") :]


@pytest.mark.parametrize("target", TARGETS)
def test_what_runs_in_a_container_gets_sigterm(target: str) -> None:
    assert last(target, "STOPSIGNAL") == "SIGTERM"
    # A string instead of a list would start a shell, which hands no signal on.
    assert yaml.safe_load(last(target, "ENTRYPOINT")) == ["tini", "--"]
    assert mistake(yaml.safe_load(last(target, "CMD"))) is None


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    assert mistake(["nanochat", "up", "--prot"])
    assert mistake(["nanochat", "stagee", "d32", "pretrain"])
    assert mistake(["nanochat", "stage", "d32", "pretrain", "--depth", "two"])


def test_base_images_are_called_by_name_alone() -> None:
    images = re.findall(r"(?m)^FROM (\S+)", DOCKERFILE)
    images += [item["image"] for item in SERVICES.values() if "image" in item]
    assert [image for image in images if "/" in image] == []
    assert [image for image in images if image.endswith(":latest")] == []


def test_every_install_keeps_to_the_constraints() -> None:
    installs = re.findall(r"pip install [^&;]+", DOCKERFILE)
    free = [line for line in installs if "--constraint constraints.txt" not in line]
    assert len(installs) > 3
    # What is left is our own wheel, whose dependencies are there already.
    assert all("--no-deps --no-index" in line for line in free)


def test_an_index_with_another_torch_needs_to_have_nothing_else() -> None:
    (line,) = re.findall(r"pip install [^&;]+--index-url [^&;]+", DOCKERFILE)
    assert "--no-deps" in line
    assert line.split()[-1] == "torch"


def test_the_build_sees_what_it_copies_and_nothing_that_is_private() -> None:
    rules = (HERE / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        word
        for words in re.findall(r"(?m)^COPY ((?!--from).+)$", DOCKERFILE)
        for word in words.split()[:-1]
    }
    assert "*" in rules
    assert copied == allowed
    assert all((INFRA.parent / name).exists() for name in allowed)


def is_sent(path: str) -> bool:
    """Whether the build gets a file: the last rule that matches it or a parent decides."""
    sent = True
    for rule in (HERE / "Dockerfile.dockerignore").read_text().splitlines():
        if rule.startswith("#"):
            continue
        pattern = re.escape(rule.removeprefix("!"))
        pattern = pattern.replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(/.*)?", path):
            sent = rule.startswith("!")
    return sent


@pytest.mark.parametrize(
    "name",
    [
        "infra/containers/stack.env",
        "infra/kubernetes/secrets.yaml",
        "infra/kubernetes/secrets.yaml~",
        "infra/systemd/nanochat.env",
        "tests/conftest.py",
    ],
)
def test_the_build_gets_no_file_with_passwords(name: str) -> None:
    assert is_sent("infra/kubernetes/secrets.example.yaml")
    assert is_sent("infra/containers/stack.env.example")
    assert not is_sent(name)


@pytest.mark.parametrize("name", ["compose.yaml", "s3.compose.yaml"])
def test_ports_are_open_on_this_machine_only(name: str) -> None:
    ports = [p for service in compose(name)["services"].values() for p in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_commands_of_ours_are_ones_that_there_are(name: str) -> None:
    command = SERVICES[name].get("command", [])
    words = shlex.split(command) if isinstance(command, str) else command
    if words[:1] == ["nanochat"]:
        assert mistake(words) is None
    if words[:2] == ["python", "-m"]:
        assert INFRA.parent.joinpath(*words[2].split(".")).with_suffix(".py").exists()
    if words[:2] == ["python", "-c"]:
        exec(words[2].partition(";")[0], {})  # its imports


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_the_time_to_save(name: str) -> None:
    from infra.prefect.server import SECONDS_TO_END

    grace = SERVICES[name]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= max(MIN_GRACE, SECONDS_TO_END)


def test_a_service_that_needs_another_waits_until_it_is_healthy() -> None:
    conditions = {
        (name, needed): rule["condition"]
        for name, service in SERVICES.items()
        for needed, rule in service.get("depends_on", {}).items()
    }
    checked = {**SERVICES, **compose("s3.compose.yaml")["services"]}
    once = {"bucket", "deploy"}
    assert len(conditions) == 6
    for (_, needed), condition in conditions.items():
        if needed in once:
            assert condition == "service_completed_successfully"
            assert SERVICES[needed]["restart"] == "no"
        else:
            assert condition == "service_healthy"
            assert "healthcheck" in checked[needed]


def test_volumes_are_named_and_no_two_supervisors_share_a_home() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    names = [mount.partition(":")[0] for mount in mounts]
    assert sorted(names) == sorted(compose()["volumes"])


def test_every_value_that_compose_asks_for_is_in_the_example_without_its_secrets() -> None:
    asked = set(re.findall(r"\$\{(\w+)", (HERE / "compose.yaml").read_text()))
    example = dict(
        line.split("=", 1) for line in ENV_EXAMPLE.splitlines() if re.match(r"\w+=", line)
    )
    assert asked == set(example)
    assert [name for name, value in example.items() if SECRET.search(name) and value] == []


def test_no_secret_is_written_into_the_stack() -> None:
    secrets = [(path, value) for path, value in leaves(SERVICES) if SECRET.search(path[-1])]
    assert secrets
    assert [path for path, value in secrets if not str(value).startswith("${")] == []


def test_files_with_values_are_never_committed() -> None:
    for folder, name in (("containers", "stack.env"), ("kubernetes", "secrets.yaml")):
        ignored = (INFRA / folder / ".gitignore").read_text().splitlines()
        assert name in ignored
        assert (
            Path(INFRA / folder / name.replace(".yaml", ".example.yaml")).exists()
            or (INFRA / folder / f"{name}.example").exists()
        )


def test_the_server_takes_changes_from_its_own_pages_and_with_its_password_alone() -> None:
    told = compose()["services"]["server"]["environment"]
    origins = told["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"].split(",")

    assert told["PREFECT_SERVER_API_AUTH_STRING"].startswith("${PREFECT_API_AUTH_STRING:?")
    assert told["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "true"
    assert f"{origins[0]}/api" == told["PREFECT_UI_API_URL"]
    assert all(
        re.fullmatch(r"http://(127\.0\.0\.1|localhost):\$\{UI_PORT:-4200\}", o) for o in origins
    )
