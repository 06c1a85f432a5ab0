"""Deployment files: valid for the tools that read them, and consistent with each other."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonpatch
import jsonschema
import kubernetes_validate
import pytest
import ray
import ray.autoscaler
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.serve.schema import ServeDeploySchema

from deploy.contradictions import check_exposure
from osd.config import Settings, dotted, load_settings
from serving.app import CLOSE_SECONDS
from tests.waiting import HANG_SECONDS, wait_until

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERAY = DEPLOY / "kuberay"
KUBERNETES = "1.32"
"""The oldest maintained version of Kubernetes at the time of writing."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


VARIANTS = ("base", "gpu", "vllm")
"""Variants of the RayService; each after the first is a patch of the one before."""


def service(variant: str) -> dict[str, Any]:
    manifest = read(KUBERAY / "base/service.yaml")
    for name in VARIANTS[1 : VARIANTS.index(variant) + 1]:
        manifest = jsonpatch.apply_patch(manifest, read(KUBERAY / name / "patch.yaml"))
    return manifest


def groups(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


def pods(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod specification of each group."""
    return {name: group["template"]["spec"] for name, group in groups(manifest).items()}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def check_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def as_pod(pod: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": pod}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_are_valid_for_kubernetes(variant: str):
    for pod in pods(service(variant)).values():
        check_kubernetes(as_pod(pod))


@pytest.mark.parametrize("name", ["disruption", "network", "redis", "storage"])
def test_other_manifests_are_valid_for_kubernetes(name: str):
    for manifest in yaml.safe_load_all((KUBERAY / f"base/{name}.yaml").read_text()):
        check_kubernetes(manifest)


def test_kustomization_lists_every_file():
    for variant in VARIANTS:
        kustomization = read(KUBERAY / variant / "kustomization.yaml")
        named = [*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", []))]
        assert all((KUBERAY / variant / name).exists() for name in named)
    assert {file.name for file in (KUBERAY / "base").iterdir()} == {
        *read(KUBERAY / "base/kustomization.yaml")["resources"],
        "kustomization.yaml",
    }


SERVE_CONFIGS = ("serve.yaml", "serve.vllm.yaml", "base", "vllm")
"""Files of Serve, and variants of the RayService that contain another configuration."""


def serve_config(name: str) -> dict[str, Any]:
    return read(DEPLOY / name) if name.endswith(".yaml") else yaml.safe_load(service(name)["spec"]["serveConfigV2"])


@pytest.mark.parametrize("name", SERVE_CONFIGS)
def test_serve_config_is_valid_and_has_no_unknown_field(name: str):
    config = serve_config(name)
    # Serve ignores unknown fields, so the parsed configuration must equal the file.
    assert ServeDeploySchema.model_validate(config).model_dump(mode="json", exclude_unset=True) == config
    assert [application["import_path"] for application in config["applications"]] == ["deploy.cluster:build"]


def settings_of(name: str, tmp_path: Path) -> Settings:
    """Return the settings of a cluster file, with secrets in temporary files."""
    values = dotted(serve_config(name)["applications"][0]["args"])
    for key in (key for key in values if key.endswith("_file")):
        secret = tmp_path / Path(values[key]).name
        secret.write_text(f"secret of {key}")
        values[key] = str(secret)
    return load_settings(environ={}, arguments=values)


@pytest.mark.parametrize("name", SERVE_CONFIGS)
def test_cluster_file_has_known_settings_and_no_password(name: str, tmp_path: Path):
    settings = settings_of(name, tmp_path)
    secured = "://:secret%20of%20redis.password_file@redis:6379/0"
    encrypted = f"rediss{secured}?ssl_ca_certs={quote(str(tmp_path / 'redis-ca'), safe='')}"
    assert settings.redis_url == (f"redis{secured}" if name.endswith(".yaml") else encrypted)
    check_exposure(settings)


def test_pod_environment_has_known_settings():
    entries = container(pods(service("gpu"))["replicas"])["env"]
    environment = {entry["name"]: entry["value"] for entry in entries if "value" in entry}
    settings = load_settings(None, (), {name: value for name, value in environment.items() if name.startswith("OSD_")})
    assert settings.target.device == "cuda"


def test_only_replicas_request_a_gpu():
    limits_of = {name: container(pod)["resources"]["limits"] for name, pod in pods(service("gpu")).items()}
    assert {name for name, limits in limits_of.items() if "nvidia.com/gpu" in limits} == {"replicas"}


def test_grace_periods_exceed_the_drain(tmp_path: Path):
    manifest = service("base")
    pod = pods(manifest)["replicas"]
    *command, seconds = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python", "-m", "deploy.leave"]
    assert int(seconds) >= settings_of("base", tmp_path).serving.drain_s + CLOSE_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + 20, "Ray ends after the replicas"
    assert manifest["spec"]["rayClusterDeletionDelaySeconds"] >= int(seconds), "pods of the previous version too"
    drain = settings_of("serve.yaml", tmp_path).serving.drain_s + CLOSE_SECONDS
    options = dict(option.split("=", 1) for option in read(ROOT / "ray_cluster.yaml")["docker"]["run_options"])
    assert options["--entrypoint"] == "osd-node"
    (leaves,) = re.findall(r"deploy\.leave (\d+)", (DEPLOY / "image/osd-node").read_text())
    (ends,) = re.findall(r"deploy\.end (\d+)", (DEPLOY / "image/ray").read_text())
    assert int(options["--stop-timeout"]) >= int(leaves) + 20 > drain
    assert int(ends) > drain
    assert read(DEPLOY / "compose.yaml")["services"]["osd"]["stop_grace_period"] == "2m"


def test_pods_have_minimal_rights():
    for pod in pods(service("base")).values():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == user_of_the_image()
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not pod["automountServiceAccountToken"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (temporary,) = (mount["name"] for mount in container(pod)["volumeMounts"] if mount["mountPath"] == "/tmp")
        assert [bool(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"] if volume["name"] == temporary] == [
            True
        ]


def user_of_the_image() -> int:
    image = (DEPLOY / "Dockerfile").read_text()
    (made,) = re.findall(r"--uid (\d+)", image)
    targets = {part.split()[2]: part for part in image.split("\nFROM ")[1:]}
    for name in ("cpu", "gpu", "vllm"):
        assert re.findall(r"^USER (\d+)$", targets[name], re.MULTILINE)[-1] == made, name
    return int(made)


def test_pods_mount_every_secret_that_they_read():
    args = dotted(serve_config("base")["applications"][0]["args"])
    for pod in pods(service("base")).values():
        secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
        paths = [mount["mountPath"] for mount in container(pod)["volumeMounts"] if mount["name"] in secrets]
        for key, file in args.items():
            assert not key.endswith("_file") or str(Path(file).parent) in paths, key


def test_ports_have_kuberay_names_and_only_serve_is_open():
    manifest = service("base")
    ports = {
        name: {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        for name, pod in pods(manifest).items()
    }
    known = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
    assert ports["head"] == known
    assert ports["replicas"].items() <= known.items()
    assert ports["replicas"]["serve"] == serve_config("base")["http_options"]["port"]
    to_all = [rule for rule in read(KUBERAY / "base/network.yaml")["spec"]["ingress"] if "from" not in rule]
    assert to_all == [{"ports": [{"port": ports["replicas"]["serve"]}]}]


def test_replicas_are_spread_and_drained_singly():
    manifest = service("base")
    budget = read(KUBERAY / "base/disruption.yaml")["spec"]
    group = {"ray.io/group": "replicas"}
    assert group.items() <= budget["selector"]["matchLabels"].items()
    assert budget["maxUnavailable"] == 1
    spread = pods(manifest)["replicas"]["topologySpreadConstraints"]
    assert {constraint["topologyKey"] for constraint in spread} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    assert all(constraint["labelSelector"]["matchLabels"] == group for constraint in spread)
    assert groups(manifest)["head"]["rayStartParams"]["num-cpus"] == "0", "the head runs no replica"


def test_cluster_survives_its_head_and_requires_a_token():
    cluster = service("base")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "rediss://ray-redis:6379"
    assert "value" not in cluster["gcsFaultToleranceOptions"]["redisPassword"]
    by_ssh = read(ROOT / "ray_cluster.yaml")
    assert "--env=RAY_AUTH_MODE=token" in by_ssh["docker"]["run_options"]
    assert "RAY_REDIS_ADDRESS=" in by_ssh["head_start_ray_commands"][-1]


def test_silent_head_or_redis_of_40_seconds_loses_no_node():
    (by_ssh,) = re.findall(r"timeout_ms=(\d+)", read(ROOT / "ray_cluster.yaml")["head_start_ray_commands"][-1])
    in_pods = {entry["name"]: entry.get("value") for entry in container(pods(service("base"))["head"])["env"]}
    assert in_pods["RAY_health_check_timeout_ms"] == by_ssh
    checks, between = ray._config.health_check_failure_threshold(), int(in_pods["RAY_health_check_period_ms"])
    # After 40 seconds without an answer TCP sends again 51 seconds after the first loss.
    assert 51_200 < (checks - 1) * int(by_ssh) < checks * (int(by_ssh) + between) <= 80_000


def test_autoscaling_of_pods_and_replicas_have_the_same_limits(tmp_path: Path):
    cluster, serving = service("base")["spec"]["rayClusterConfig"], settings_of("base", tmp_path).serving
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"]
    assert serving.replicas_per_node == 1
    assert (group["minReplicas"], group["maxReplicas"]) == (serving.replicas, serving.replica_limit)


def test_only_the_autoscaler_mounts_a_token_of_kubernetes():
    cluster = service("base")["spec"]["rayClusterConfig"]
    tokens = {
        volume["name"]
        for pod in pods(service("base")).values()
        for volume in pod["volumes"]
        if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", ()))
    }
    assert tokens == {mount["name"] for mount in cluster["autoscalerOptions"]["volumeMounts"]}
    for pod in pods(service("base")).values():
        assert tokens.isdisjoint(mount["name"] for mount in container(pod)["volumeMounts"])


def test_secrets_of_the_manifests_are_those_that_the_script_makes():
    script = (KUBERAY / "secrets.sh").read_text()
    base = "".join(file.read_text() for file in sorted((KUBERAY / "base").iterdir()))
    used = {*re.findall(r"name: osd, key: ([\w-]+)", base), *re.findall(r"/run/secrets/osd/([\w-]+)", base)}
    used |= {"tls.key", "tls.crt"}
    assert used == set(re.findall(r"--from-file=([\w.-]+)", script))


def test_ray_cluster_file_is_valid_for_ray_up():
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(read(ROOT / "ray_cluster.yaml"), schema)


def output_of(name: str, *arguments: str | Path) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_dockerfile_has_no_hadolint_findings():
    assert output_of("hadolint", DEPLOY / "Dockerfile") == (0, "")


def requirements_of(extras: set[str]) -> dict[str, Requirement]:
    """Return the requirements of osd with these extras on this machine, by name."""
    lines = map(Requirement, importlib.metadata.requires("osd-llm") or ())
    here = [line for line in lines if any(not line.marker or line.marker.evaluate({"extra": e}) for e in extras)]
    return {canonicalize_name(line.name): line for line in here if line.name != "osd-llm"}


def test_hashed_requirements_of_the_image_agree_with_the_project():
    lines = [line for line in (DEPLOY / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups() for line in lines)  # type: ignore[union-attr]
    assert len(pins) == len(lines)
    for name, requirement in requirements_of({"", "serve", "cluster", "gpu", "otel", "s3"}).items():
        assert requirement.specifier.contains(pins[name], prereleases=True), name
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in constraints)}
    assert {name for name in pins.keys() & tested if pins[name] != tested[name]} == set()


def test_compose_files_are_valid():
    check = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    code, text = output_of(*check, *DEPLOY.glob("compose*.yaml"))
    assert code == 0, text


def test_compose_gives_no_rights_and_hides_passwords():
    compose = read(DEPLOY / "compose.yaml")["services"]
    for service in compose.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert compose["osd"]["read_only"]
    assert compose["redis"]["read_only"]
    assert "requirepass $$REDIS_PASSWORD" in compose["redis"]["command"][-1]  # the shell reads the variable
    values = {**dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "compose.env").read_text(), re.M)), "OSD_API_KEY": "k"}
    environment = {name: filled(text, values) for name, text in compose["osd"]["environment"].items()}
    settings = load_settings(environ={"OSD_SERVING__HOST": "0.0.0.0", **environment})  # noqa: S104
    check_exposure(settings)
    assert settings.target.source == values["OSD_MODEL"]
    assert settings.serving.api_key is not None


def filled(text: str, values: dict[str, str]) -> str:
    """Return a value of a compose file with the variables of an env file."""
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda match: values[match[1]], text)


@pytest.mark.parametrize("name", ["compose.gpu.yaml", "compose.vllm.yaml"])
def test_compiled_kernels_can_be_loaded_on_gpus(name: str):
    (base,), (override,) = (read(DEPLOY / file)["services"]["osd"]["tmpfs"] for file in ("compose.yaml", name))
    assert override.endswith(",exec")
    assert override.partition("=")[0] == base.partition("=")[0], "compose replaces an entry with the same beginning"


def test_vllm_of_compose_and_pods_is_that_of_the_image(tmp_path: Path):
    (folder,) = re.findall(r"osd vllm install (\S+)", (DEPLOY / "Dockerfile").read_text())
    environment = read(DEPLOY / "compose.vllm.yaml")["services"]["osd"]["environment"]
    variables = {name: value for name, value in environment.items() if name.startswith("OSD_")}
    for settings in (load_settings(environ=variables), settings_of("vllm", tmp_path)):
        assert settings.engine.kind == "vllm"
        assert str(settings.engine.vllm.python) == f"{folder}/bin/python"


def test_pods_with_vllm_have_memory_for_captured_steps():
    pod = pods(service("vllm"))["replicas"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    assert volumes[mounts["/tmp"]]["emptyDir"] == {"sizeLimit": "10Gi"}


@pytest.mark.parametrize("name", ["compose.yaml", "kuberay/base/redis.yaml", "Dockerfile"])
def test_images_of_others_are_pinned_by_hash(name: str):
    images = re.findall(r"^ *(?:image: |ARG BASE=)(?!osd:)(.+)$", (DEPLOY / name).read_text(), re.MULTILINE)
    assert images
    assert [image for image in images if not re.fullmatch(r"[\w/.-]+:v?\d[\w.-]+@sha256:[0-9a-f]{64}", image)] == []


def test_prometheus_of_compose_sends_the_key():
    compose = read(DEPLOY / "compose.yaml")
    (scrape,) = read(DEPLOY / "prometheus.yml")["scrape_configs"]
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose["secrets"][secret] == {"environment": "OSD_API_KEY"}


def test_image_has_the_programs_of_probes_and_ray_up():
    build, base, gpu = re.findall(r"--no-install-recommends (.*?) &&", (DEPLOY / "Dockerfile").read_text())
    assert {"openssh-client", "rsync", "wget"} <= set(base.split())
    assert build == gpu == "gcc libc6-dev"
    assert "HF_HOME=/data/" in (DEPLOY / "Dockerfile").read_text()


def test_scripts_are_valid_and_can_be_run():
    for script in (DEPLOY / "image/osd-node", DEPLOY / "image/ray", KUBERAY / "secrets.sh"):
        assert script.stat().st_mode & 0o111 == 0o111
        subprocess.run(["/bin/bash", "-n", script], check=True)


def test_ray_stop_ends_the_service_and_other_commands_do_not(tmp_path: Path):
    wrapper = tmp_path / "bin/ray"
    for program in (tmp_path / "bin/python", tmp_path / "libexec/ray"):
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho {program.name} "$@"\n')
        program.chmod(0o755)
    shutil.copy(DEPLOY / "image/ray", wrapper)
    environment = {"PATH": f"{wrapper.parent}:/usr/bin:/bin"}
    for arguments, expected in {
        "stop": "python -m deploy.end 120\nray stop\n",
        "stop --force": "ray stop --force\n",
        "start --head": "ray start --head\n",
    }.items():
        command = [wrapper, *arguments.split()]
        assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == expected
    environment["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "token")
    for content in (None, "", "secret"):
        if content is not None:
            (tmp_path / "token").write_text(content)
        done = subprocess.run([wrapper, "start"], env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) == (content == "secret")
        assert ("write the token" in done.stderr) == (content != "secret")


def test_node_drains_when_its_container_is_stopped(tmp_path: Path):
    python, called = tmp_path / "python", tmp_path / "called"
    python.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    python.chmod(0o755)
    started = tmp_path / "started"
    sleep = tmp_path / "sleep"
    sleep.write_text(f'#!/bin/sh\ntouch {started}\nexec /bin/sleep "$@"\n')
    sleep.chmod(0o755)
    node = subprocess.Popen(
        [DEPLOY / "image/osd-node", "bash"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, process_group=0
    )
    try:
        wait_until(started.exists)
        node.terminate()
        assert node.wait(HANG_SECONDS) == 0
    finally:
        os.killpg(node.pid, signal.SIGKILL)
    assert called.read_text() == "-m deploy.leave 90\n"
