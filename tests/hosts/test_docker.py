"""docker/: what can be said of it without a Docker engine, and Dockerfile.cpu really built and run."""

import os
import pathlib
import shutil
import subprocess
import sysconfig

import pytest
import yaml
from machines import ROOT

from pipetrain.config.load import load_config
from pipetrain.trainer.prepare import prepare

DOCKER = ROOT / "docker"
TRY_NEEDS = ["buildah", "debootstrap", "apt-get"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_dockerfiles_pass_the_linter(name: str) -> None:
    hadolint = pathlib.Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, "--no-color", DOCKER / name], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_images_run_as_a_user_and_check_themselves(name: str) -> None:
    lines = (DOCKER / name).read_text().splitlines()
    (user,) = [line for line in lines if line.startswith("USER")]
    assert any(f"--uid {user.split()[1]} pipetrain" in line for line in lines)
    (check,) = [line for line in lines if line.startswith("HEALTHCHECK")]
    assert check.endswith('CMD ["pipetrain", "verify", "--quick"]')
    assert lines.index(user) < lines.index(check)


def test_what_is_copied_is_there() -> None:
    """All that the build of the package needs, by the allow-list of .dockerignore."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [path for path in kept if not (ROOT / path).exists()] == []
    assert {"pyproject.toml", "constraints.txt", "pipetrain", "conf", "benchmarks"} <= set(kept)


def test_compose_starts_two_ranks_of_one_run() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    nodes = compose["services"]
    assert set(nodes) == {"node0", "node1"}
    first = nodes["node0"]
    assert nodes["node1"]["command"] == first["command"]
    for name, node in nodes.items():
        assert node["hostname"] == name
        assert node["networks"] == list(compose["networks"])
        assert [volume.split(":")[0] for volume in node["volumes"]] == list(compose["volumes"])
        assert (DOCKER / node["build"]["context"] / node["build"]["dockerfile"]).is_file()
    torchrun, module = first["command"][: first["command"].index("-m")], first["command"].index("-m") + 1
    assert torchrun[0] == "torchrun"
    assert f"--nnodes={len(nodes)}" in torchrun
    assert "--rdzv-endpoint=node0:29400" in torchrun
    assert first["command"][module] == "pipetrain.train"
    config = load_config(first["command"][module + 1 :])
    assert prepare(config).plan.num_ranks == len(nodes)
    assert config.run_dir is not None
    assert config.run_dir.startswith(first["volumes"][0].split(":")[1] + "/")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="building without Docker needs root")
@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TRY_NEEDS),
    reason=f"needs {', '.join(TRY_NEEDS)}: apt-get install buildah debootstrap crun",
)
def test_the_cpu_image_is_built_and_verifies_itself() -> None:
    before = set(pathlib.Path("/tmp").glob("pipetrain-image-*"))
    done = subprocess.run([DOCKER / "try.sh"], capture_output=True, text=True, check=False, timeout=1780)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "48 cases, all equal bit for bit" in done.stdout
    assert done.stdout.splitlines()[-1] == "runs as pipetrain"
    assert set(pathlib.Path("/tmp").glob("pipetrain-image-*")) == before
