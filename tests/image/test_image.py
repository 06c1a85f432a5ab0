"""The image: it is built, runs without rights, answers, and ends whole; `make image`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from osd.capture.server import free_port
from tests.clients import ClientThread
from tests.image.engine import Engine, find_base, find_engine
from tests.tiny import make_tiny
from tests.waiting import wait_until

pytestmark = [pytest.mark.image, pytest.mark.timeout(2000)]

TAG, LARGEST, STREAMS, USER = "localhost/osd:test", 2.2e9, 8, 1000
STOPPED = (0, 130)


@pytest.fixture(scope="session")
def engine() -> Engine:
    engine = find_engine()
    find_base(engine)
    return engine


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    engine.build("cpu", TAG)
    return TAG


@pytest.fixture(scope="session")
def gpu_image(engine: Engine) -> str:
    engine.build("gpu", f"{TAG}-gpu")
    return f"{TAG}-gpu"


@pytest.fixture
def service(engine: Engine, image: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Start the image without rights, with nothing writable but /data and /tmp; yield its name and address."""
    if refusal := engine.refusal(image):
        pytest.skip(refusal)
    make_tiny(tmp_path / "tiny", layers=96)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    name, port = f"osd-test-{free_port()}", free_port()
    settings = {"TARGET__SOURCE": "/data/tiny", "TARGET__DTYPE": "float32", "ENGINE__SLOTS": STREAMS,
                "ENGINE__CONTEXT": 1024, "SERVING__ALLOWED_HOSTS": "127.0.0.1"}  # fmt: skip
    variables = [part for key, value in settings.items() for part in ("--env", f"OSD_{key}={value}")]
    rights = ["--user", f"{USER}:{USER}", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only"]
    rights += ["--tmpfs=/tmp", "--env=HOME=/tmp", "--shm-size=1g", f"--volume={tmp_path}:/data"]
    engine.call("run", "--detach", "--name", name, f"--publish=127.0.0.1:{port}:8000", *rights, *variables, image)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        running = engine.call("inspect", "--format", "{{.State.Running}}", name).stdout.strip()
        assert running == "true", engine.call("logs", name, check=False).stderr
        try:
            return httpx2.get(f"{url}/health").status_code == 200
        except httpx2.HTTPError:
            return False

    try:
        wait_until(answers, every=0.5, what="an answer of the image")
        yield name, url
    finally:
        engine.call("rm", "--force", name, check=False)


def test_image_for_cpus_is_small(engine: Engine, image: str):
    size = engine.bytes_of(image)
    print(f"{size / 1e9:.2f} GB")
    assert size <= LARGEST


def test_service_chats_and_ends_its_streams_when_stopped(engine: Engine, service: tuple[str, str]):
    name, url = service
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert json.loads(answer.content)["choices"][0]["message"]["content"]
    clients = [ClientThread(url, max_tokens=600, stream=True) for _ in range(STREAMS)]
    for client in clients:
        assert client.started.wait(60)
    stop = threading.Thread(target=engine.call, args=("stop", "--time", "120", name), kwargs={"seconds": 200})
    stop.start()
    assert [client.error() for client in clients] == [None] * STREAMS
    stop.join()
    code = int(engine.call("inspect", "--format", "{{.State.ExitCode}}", name).stdout)
    assert code in STOPPED, engine.call("logs", name).stderr


def test_image_for_gpus_compiles_against_python(engine: Engine, gpu_image: str):
    script = (
        'printf "#include <Python.h>\\nint main(void) { return 0; }\\n" >/tmp/a.c && gcc -c /tmp/a.c -o /tmp/a.o '
        '-I"$(python -c "import sysconfig; print(sysconfig.get_path(\'include\'))")" && '
        "python -c \"import importlib.metadata as m; print(m.version('torchao'))\""
    )
    assert engine.output_of(gpu_image, script).strip()


def test_programs_of_ray_up_are_in_the_image(engine: Engine, image: str):
    version, *programs = engine.output_of(image, "ray --version && command -v osd-node rsync ssh wget").splitlines()
    assert version.startswith("ray, version")
    assert len(programs) == 4
