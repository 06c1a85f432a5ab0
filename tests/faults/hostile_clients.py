"""Process of hostile clients, which attack a service until their standard input ends.

The first line of standard input is ``{"port", "ports", "key", "seed", "requests"}``: the port of the service, all ports
of its processes, an API key, the seed of the choice of attacks, and a file with generated requests. At the end the
process prints the number of connections by attack and status. A status is the status of the first answer, "none" if the
service closes the connection without one, or "left" if the client does not wait for an answer.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from string import ascii_uppercase
from typing import Any

CLIENTS, PAUSE_SECONDS = 12, 3
"""Clients, and their mean pause between two attacks."""
SECONDS = 60
"""Time limit of a connection that neither sends nor receives."""
IDLE, IDLE_SECONDS = 1000, 15
STALL_SECONDS = 6
ADDRESS = "127.0.0.1"

DEPTHS = (99, 101, 600, 980, 5000, 400_000)
BOMB = gzip.compress(bytes(20 << 20), 1)
MEGABYTE = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models", "/metrics", "/admin/drafters", "/dashboard/data",
         "/dashboard/stream", "/load", "/nothing")  # fmt: skip


def ambiguous(letters: Iterable[str]) -> str:
    """Return a regular expression that compiles fast and keeps many alternatives open."""
    return "|".join(f"[a-zA-Z ,.]*{letter}[a-zA-Z ,.]{{200}}" for letter in letters)


def choices(chance: random.Random) -> list[str]:
    """Return a list of choices that takes some MB when it is compiled."""
    return ["".join(chance.choices("abc", k=60)) for _ in range(1000)]


def long_lists() -> list[str]:
    """Return bodies with long lists. Making them takes much processor time, so all attacks share them."""
    chance = random.Random(0)  # noqa: S311
    texts = ["".join(chance.choices("abc", k=9)) for _ in range(20_000)]
    fields: tuple[dict[str, Any], ...] = (
        {"stop": texts},
        {"logit_bias": {str(number): 1 for number in range(20_000)}},
        {"prompt": list(range(200)) * 500},
        {"messages": [{"role": "user", "content": "a"}] * 10_000},
        {"tools": [{"type": "function", "function": {"name": text}} for text in texts[:5000]]},
        {"metadata": dict.fromkeys(texts, 1)},
        {"chat_template_kwargs": {text: [] for text in texts}},
        {"chat_template_kwargs": {"a" * 1_000_000: 1}},
        {"tokens": [1] * 300_000},
    )
    return [json.dumps({"prompt": "a", "max_tokens": 2, **each}) for each in fields]


LONG_LISTS = long_lists()


class Client:
    """Hostile client; ``requests`` are generated requests and their ends."""

    def __init__(self, order: dict[str, Any], requests: list[tuple[bytes, str]], number: int) -> None:
        self.port, self.ports, self.key, self.requests = order["port"], order["ports"], order["key"], requests
        self.random = random.Random(f"{order['seed']}-{number}")  # noqa: S311
        self.statuses: list[str] = []
        """Attack and status of each connection."""

    def run(self) -> None:
        """Attack until the process ends."""
        while True:
            time.sleep(self.random.uniform(0, 2 * PAUSE_SECONDS))
            attack = self.random.choice(ATTACKS)
            try:
                status = attack(self)
            except OSError:
                status = "none"
            self.statuses.append(f"{attack.__name__} {status}")

    def connect(self, port: int | None = None) -> socket.socket:
        """Return a connection to the service or to another port."""
        return socket.create_connection((ADDRESS, port or self.port), timeout=SECONDS)

    def request(self, path: str, body: bytes | str, method: str = "POST", **headers: str) -> bytes:
        """Return the bytes of a request with the client's key."""
        data = body if isinstance(body, bytes) else body.encode()
        lines = {
            "host": ADDRESS, "authorization": f"Bearer {self.key}", "content-type": "application/json",
            "content-length": str(len(data)), "connection": "close",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data

    def send(self, data: bytes) -> str:
        """Send bytes and read the answer to its end; return the status."""
        with self.connect() as connection:
            connection.sendall(data)
            return self.read(connection)

    def read(self, connection: socket.socket) -> str:
        """Read to the end of the connection; return the status of the first answer."""
        first = b""
        while part := connection.recv(65536):
            first = first or part
        return first[9:12].decode("latin-1") or "none"

    def post(self, path: str, **fields: Any) -> str:
        """Send fields as JSON; return the status."""
        return self.send(self.request(path, json.dumps(fields)))


def generated_requests(client: Client) -> str:
    data, end = client.random.choice(client.requests)
    line, separator, rest = data.partition(b"\r\n")
    with client.connect() as connection:
        connection.sendall(line + separator + f"authorization: Bearer {client.key}\r\n".encode() * bool(rest) + rest)
        if end == "leave":
            return "left"
        if end == "half":
            connection.shutdown(socket.SHUT_WR)
        return client.read(connection)


def complex_forms(client: Client) -> str:
    properties = {f"name{number}": {"type": "null"} for number in range(300)}  # too complex after the first token
    forms = (
        {"regex": ambiguous("ABCDEFGHIJKLMNOP")},
        {"regex": ambiguous(client.random.sample(ascii_uppercase, 16))},
        {"regex": f"([a-z]*{client.random.choice('abcdef')}[a-z]{{40}})+"},
        {"grammar": 'start: x\nx: x x | "a" | "b" | x "c" x'},
        {"json": {"type": "array", "items": {"type": "string", "pattern": "^([a-z]*a[a-z]{40})+$"}}},
        {"json": {"type": "object", "properties": properties}},
        {"choice": choices(client.random)},
    )
    text = "".join(client.random.choices("abcdef", k=8))
    form, stream = client.random.choice(forms), client.random.random() < 0.5
    return client.post(COMPLETIONS, prompt=text, max_tokens=64, structured_outputs=form, stream=stream)


def deep_nesting(client: Client) -> str:
    depth = client.random.choice(DEPTHS)
    begin, end = client.random.choice([("[", "]"), ('{"a":', "}")])
    value = begin * depth + "1" + end * depth * client.random.randint(0, 1)
    text = json.dumps(value)
    turn = '{"role": "user", "content": "a"}'
    call = f'{{"id": "a", "type": "function", "function": {{"name": "f", "arguments": {text}}}}}'
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {value}}}}}'
    schema = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {value}}}}}'
    bodies = (
        value,
        f'{{"prompt": {value}}}',
        f'{{"messages": [{turn}, {{"role": "assistant", "content": "", "tool_calls": [{call}]}}], "max_tokens": 2}}',
        f'{{"messages": [{turn}], "tools": [{tool}], "max_tokens": 2}}',
        f'{{"messages": [{turn}], "response_format": {schema}, "max_tokens": 2}}',
        f'{{"messages": [{turn}], "chat_template_kwargs": {value}, "max_tokens": 2}}',
        f'{{"prompt": "a", "structured_outputs": {{"json": {text}}}, "max_tokens": 2}}',
        f'{{"prompt": "a", "structured_outputs": {{"regex": {json.dumps("(" * depth + "a" + ")" * depth)}}}}}',
        f'{{"prompt": "a", "structured_outputs": {{"grammar": {json.dumps("start: " + "(" * depth + "x")}}}}}',
        f'{{"prompt": "a", "logit_bias": {value}, "max_tokens": 2}}',
    )
    return client.send(client.request(client.random.choice(PATHS[:4]), client.random.choice(bodies)))


def huge_heads(client: Client) -> str:
    lines = client.random.choice([b"a: " + b"b" * 1000 + b"\r\n", b"b" * 1000])
    begin = client.random.choice([b"GET /health HTTP/1.1\r\n", b"GET /", b""])
    with client.connect(client.random.choice(client.ports)) as connection:
        connection.sendall(begin)
        for _ in range(4000):
            connection.sendall(lines)
        return "left"


def endless_heads(client: Client) -> str:
    with client.connect(client.random.choice(client.ports)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        end = time.monotonic() + STALL_SECONDS
        while time.monotonic() < end:
            connection.sendall(b"a: b\r\n")
            time.sleep(0.1)
        return "left"


def slow_readers(client: Client) -> str:
    body = json.dumps({"prompt": "hello", "max_tokens": 100, "stream": True, "logprobs": 5, "ignore_eos": True})
    with socket.socket() as connection:
        connection.settimeout(SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect((ADDRESS, client.port))
        connection.sendall(client.request(COMPLETIONS, body))
        first, end = connection.recv(64), time.monotonic() + STALL_SECONDS
        while time.monotonic() < end and connection.recv(64):
            time.sleep(0.1)
        return first[9:12].decode("latin-1")


def slow_bodies(client: Client) -> str:
    data = client.request(COMPLETIONS, json.dumps({"prompt": "a" * 100, "max_tokens": 2}))
    with client.connect() as connection:
        connection.sendall(data[:-60])
        for index in range(len(data) - 60, len(data)):
            connection.sendall(data[index : index + 1])
            time.sleep(0.1)
        return client.read(connection)


def resets(client: Client) -> str:
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "stream": client.random.random() < 0.5, "n": 2})
    data = client.request(COMPLETIONS, body)
    with client.connect() as connection:
        connection.sendall(data[: client.random.choice([0, 60, -20, len(data), len(data)])])
        time.sleep(client.random.choice([0, 0.05, 0.5]))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"


def gzip_bombs(client: Client) -> str:
    path = client.random.choice(PATHS[:4])
    return client.send(client.request(path, BOMB, content_encoding="gzip", accept_encoding="gzip"))


def long_texts(client: Client) -> str:
    text = "".join(client.random.choices("ab ", k=1000)) * 1040
    turns = [{"role": "user", "content": part} for part in (text[: MEGABYTE // 2], text[: MEGABYTE // 2 - 200])]
    fields = client.random.choice([{"prompt": text}, {"messages": turns}, {"prompt": [text[:1000]] * 1000}])
    path = client.random.choice(["/tokenize", CHAT if "messages" in fields else COMPLETIONS])
    return client.post(path, **fields)


def new_domains(client: Client) -> str:
    domain = f"d{client.random.randrange(100_000)}"
    return client.post(COMPLETIONS, prompt=domain, max_tokens=2, osd={"domain": domain})


def bad_keys(client: Client) -> str:
    keys = ("Bearer wrong", "", "Bearer " + "a" * 60_000, "Bearer \xff\xfe", "Basic YTpi", "Bearer", "Bearer a\tb")
    key, path = client.random.choice(keys), client.random.choice(PATHS)
    method = client.random.choice(["GET", "POST", "DELETE"])
    return client.send(client.request(path, '{"prompt": "a"}', method, authorization=key))


def oversized_numbers(client: Client) -> str:
    fields = ("n", "max_tokens", "logprobs", "best_of", "timeout", "priority", "seed", "top_k", "temperature")
    number, field = client.random.choice([10_000, 2**31, 2**63, 10**30, -1, 1e308, 0.5]), client.random.choice(fields)
    return client.post(COMPLETIONS, **{"prompt": "a", "max_tokens": 2, field: number})


def large_lists(client: Client) -> str:
    path = client.random.choice([CHAT, COMPLETIONS])
    return client.send(client.request(path, client.random.choice(LONG_LISTS)))


def malformed_bodies(client: Client) -> str:
    bodies = (b"", b"{", b"\xff\xfe\x00", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"nan", b'{"prompt": 1e999}',
              b'{"a": 1, "a": 2}', b"\x00" * 1000, b'"' * 100_000, b"9" * 500_000, b"\xef\xbb\xbf{}")  # fmt: skip
    return client.send(client.request(client.random.choice(PATHS[:4]), client.random.choice(bodies)))


def malformed_chunks(client: Client) -> str:
    chunks = (b"zz\r\n", b"-1\r\n", b"f" * 40 + b"\r\n", b"3\r\nabcdef", b"1;" + b"x" * 70_000, b"1\r\na\r\n" * 50_000,
              b"0\r\na: b\r\n" * 20_000)  # fmt: skip
    data = client.request(COMPLETIONS, b"", content_length="", transfer_encoding="chunked")
    return client.send(data + client.random.choice(chunks) + b"0\r\n\r\n")


def upgrades(client: Client) -> str:
    headers = {"upgrade": "websocket", "sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ==", "sec_websocket_version": "13"}
    return client.send(client.request(client.random.choice(PATHS), b"", "GET", **headers, connection="Upgrade"))


def pipelines(client: Client) -> str:
    data = client.request(COMPLETIONS, '{"prompt": "a", "max_tokens": 2}', connection="")
    return client.send(data * client.random.randint(2, 1000))


ATTACKS: tuple[Callable[[Client], str], ...] = (
    generated_requests, generated_requests, generated_requests, complex_forms, deep_nesting, huge_heads, endless_heads,
    slow_readers, slow_bodies, resets, gzip_bombs, long_texts, new_domains, new_domains, bad_keys, oversized_numbers,
    large_lists, malformed_bodies, malformed_chunks, upgrades, pipelines,
)  # fmt: skip


def hold_idle_connections(port: int) -> None:
    """Keep connections open that send nothing."""
    while True:
        connections: list[socket.socket] = []
        while len(connections) < IDLE:
            connections.append(socket.create_connection((ADDRESS, port), timeout=SECONDS))
            time.sleep(0.01)
        time.sleep(IDLE_SECONDS)
        for connection in connections:
            connection.close()


def main() -> None:
    """Attack until standard input ends."""
    os.nice(19)  # hostile clients use other machines, and so take no processor time from the service
    order = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with open(order["requests"]) as file:
        requests = [(data.encode("latin-1"), end) for data, end in json.load(file)]
    clients = [Client(order, requests, number) for number in range(CLIENTS)]
    for client in clients:
        threading.Thread(target=client.run, daemon=True).start()
    threading.Thread(target=hold_idle_connections, args=(order["port"],), daemon=True).start()
    sys.stdin.read()
    print(json.dumps(Counter(status for client in clients for status in list(client.statuses))), flush=True)
    os._exit(0)  # the connections break


if __name__ == "__main__":
    main()
