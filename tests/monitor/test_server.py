# SPDX-License-Identifier: Apache-2.0
"""The server of the page: who may ask, what can be read, what is sent."""

import contextlib
import http.client
import re
import socket
import threading
import time
from urllib.parse import quote

import numpy as np
import pytest
from planted_runs import START, planted_records, planted_run, unpacked, write_lines, write_steps

from accelerate.core.errors import ConfigurationError
from accelerate.monitor.current import current_state
from accelerate.monitor.page_data import packed
from accelerate.monitor.run import open_runs
from accelerate.monitor.server import Server
from accelerate.monitor.view import view
from accelerate.telemetry.records import events_file


@contextlib.contextmanager
def serving(*folders, host=None, port=0):
    with Server(open_runs([str(folder) for folder in folders]), host, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return planted_run(tmp_path_factory.mktemp("runs") / "run", 1000, 3, slow=2)


def test_the_page_and_its_data(run):
    with serving(run) as server:
        status, page, headers = get(server, "/")
        assert (
            status == 200
            and b'src="page.js"' in page
            and b"http" not in page.replace(b"http-equiv", b"")
        )
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for name in ("page.js", "charts.js", "page.css"):
            status, content, _ = get(server, f"/{name}")
            assert status == 200 and b"://" not in content
        found = unpacked(get(server, "/api/view?pixels=200")[1])
        (sent,) = found["runs"]
        expected = view(server.runs[0], pixels=200)
        assert sent["width"] == 8 and np.allclose(
            sent["curves"]["loss"]["mean"], expected.curves["loss"].mean
        )
        assert np.allclose(sent["own"], expected.own) and np.array_equal(
            sent["slow"], expected.slow
        )
        assert np.allclose(sent["phases"]["data"], expected.phases["data"].mean(axis=0), rtol=1e-4)
        assert "transfer" not in sent["phases"] and [
            one["rank"] for one in sent["summary"]["stragglers"]
        ] == [2]
        assert get(server, f"/api/view?version={found['version']}")[0] == 204
        part = unpacked(get(server, "/api/view?start=301&stop=400&pixels=100")[1])["runs"][0]
        assert part["width"] == 1 and part["x"].tolist() == list(range(301, 401))
        assert get(server, "/api/view?start=9000")[0] == 200
        for query in ("start=x", "start=0", "stop=-1", "pixels=1e9", "stop=99999999999"):
            assert get(server, f"/api/view?{query}")[0] == 400
        assert get(server, "/nothing")[0] == 404


def test_metrics_are_in_the_text_format_of_prometheus(run, tmp_path):
    odd = planted_run(tmp_path / 'a "b" \\ c', 20, 1)
    with serving(run, odd) as server:
        status, text, headers = get(server, "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples, names = {}, []
    for line in text.decode().splitlines():
        if comment := re.fullmatch(r"# (HELP|TYPE) (accelerate_[a-z_]+) (.+)", line):
            assert comment[1] == "HELP" or comment[3] == "gauge"
            names.append(comment[2])
        else:
            name, labels, value = re.fullmatch(r"([a-z_]+)\{(.+)\} (\S+)", line).groups()
            assert name == names[-1] == names[-2]
            pairs = re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"(?:,|$)', labels)
            values = {key: label.replace('\\"', '"').replace("\\\\", "\\") for key, label in pairs}
            samples[(name.removeprefix("accelerate_"), *values.values())] = float(value)
    assert len(names) == 2 * len(set(names))
    assert samples["step", "run"] == 1000 and samples["step", odd.name] == 20
    assert [samples["slow_rank", "run", str(rank)] for rank in range(3)] == [0, 0, 1]
    expected = current_state(server.runs[0])
    for name in ("loss", "steps_per_second", "samples_per_second", "tokens_per_second", "ranks"):
        assert samples[name, "run"] == getattr(expected, name)
    assert samples["logged", "run", "eval/accuracy"] == expected.logged["eval/accuracy"]
    assert samples["ended", "run"] == 0 and samples["age_seconds", "run"] > 0


def test_a_new_step_is_in_the_next_answer(tmp_path):
    records = planted_records(300)
    write_steps(tmp_path, 0, 1, records[:100])
    with serving(tmp_path) as server:
        found = unpacked(get(server, "/api/view")[1])
        write_steps(tmp_path, 0, 1, records[100:101], "ab")
        while (answer := get(server, f"/api/view?version={found['version']}"))[0] == 204:
            pass
        assert unpacked(answer[1])["runs"][0]["last"] == 101


def test_an_old_summary_is_replaced_when_the_run_rests(tmp_path, monkeypatch):
    records = planted_records(300)
    write_steps(tmp_path, 0, 1, records[:100])
    (run,) = open_runs([str(tmp_path)])
    clock = [100.0]
    with Server([run], port=0) as server:
        monkeypatch.setattr("accelerate.monitor.server.time.monotonic", lambda: clock[0])
        server.answer(None, None, 100, "")
        write_steps(tmp_path, 0, 1, records[100:], "ab")
        clock[0] += 1
        found = unpacked(server.answer(None, None, 100, ""))
        assert (
            found["runs"][0]["last"] == 300
            and "to 100 " in found["runs"][0]["summary"]["sentences"][0]
        )
        assert server.answer(None, None, 100, found["version"]) is None
        clock[0] += 2
        found = unpacked(server.answer(None, None, 100, found["version"]))
        assert "to 300 " in found["runs"][0]["summary"]["sentences"][0]
        clock[0] += 9
        assert server.answer(None, None, 100, found["version"]) is None


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost:9999", "[::1]:80", "LOCALHOST"])
def test_names_of_this_machine_are_accepted(run, name):
    with serving(run) as server:
        assert get(server, "/", Host=name)[0] == 200


@pytest.mark.parametrize(
    "name",
    [
        "evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "10.0.0.1", "", "evil.example@127.0.0.1",
        "127.0.0.1/evil.example", "[::1", "[evil", "127.0.0.1:x",
    ],
)  # fmt: skip
def test_foreign_names_are_refused(run, name):
    with serving(run) as server:
        for path in ("/", "/api/view", "/page.js", "/file/0/x"):
            assert get(server, path, Host=name)[0] == 403


def test_another_address_needs_the_token(run):
    with serving(run, host="127.0.0.1") as server:
        assert server.url.endswith(f"/?token={server.token}") and len(server.token) >= 20
        for path in ("/", "/api/view", "/file/0/x"):
            for query in ("", "?token=", "?token=wrong", "?token=%ff", f"?token={server.token}x"):
                assert get(server, path + query)[0] == 403
        assert get(server, f"/?token={server.token}")[0] == 200
        assert get(server, f"/api/view?token={server.token}")[0] == 200
        assert get(server, f"/?token={server.token}", Host="10.0.0.7:6606")[0] == 200
        assert get(server, f"/?token={server.token}", Host="evil.example")[0] == 403
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1" and server.token is None


def test_only_files_of_events_inside_the_run_are_sent(tmp_path):
    folder = planted_run(tmp_path / "run", 10, 1)
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "other.txt").write_text("not named by an event")
    (folder / "hang").mkdir()
    (folder / "hang" / "report 1.txt").write_text("stuck here")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "outside").symlink_to(tmp_path)
    bad = [
        "../secret.txt",
        "hang/../../secret.txt",
        str(tmp_path / "secret.txt"),
        "link.txt",
        "outside/secret.txt",
        "hang",
        "no",
    ]
    for path in [*bad, "hang/report 1.txt", "a\0b"]:
        write_lines(events_file(folder, 0), {"time": START, "event": "hang", "path": path})
    with serving(folder) as server:
        sent = unpacked(get(server, "/api/view")[1])["runs"][0]
        assert [event["path"] for event in sent["events"] if "file" in event] == [
            "hang/report 1.txt"
        ]
        status, data, headers = get(server, "/file/0/hang/report%201.txt")
        assert (status, data) == (200, b"stuck here") and headers[
            "Content-Disposition"
        ] == "attachment"
        assert headers["Content-Type"] == "application/octet-stream"
        double = [
            "..%2fsecret.txt",
            "%2e%2e/secret.txt",
            "..%252fsecret.txt",
            "//etc/passwd",
            "a%00b",
            "other.txt",
        ]
        for path in [*map(quote, bad), *bad[:5], *double]:
            assert get(server, f"/file/0/{path.replace(' ', '%20')}")[0] == 404, path
        for path in (
            "/file/",
            "/file/1/x",
            "/file/-1/x",
            "/file/x/x",
            "/file/0",
            "/../secret.txt",
            "/page/../page.js",
        ):
            assert get(server, path)[0] == 404, path


def test_the_files_of_a_run_that_was_copied_are_linked(tmp_path):
    folder = planted_run(tmp_path / "first", 10, 1)
    for name in ("profile/rank_00000.json", "memory/rank_00000.txt", "other/secret.txt"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(name)
    for name in ("profile/rank_00000.json", "memory/rank_00000.txt"):
        write_lines(
            events_file(folder, 0), {"time": START, "event": "profile", "path": str(folder / name)}
        )
    folder.rename(tmp_path / "second")
    (tmp_path / "first" / "profile").mkdir(parents=True)
    (tmp_path / "first" / "profile" / "rank_00000.json").write_text("of another run")
    with serving(tmp_path / "second") as server:
        sent = unpacked(get(server, "/api/view")[1])["runs"][0]
        assert sum("file" in event for event in sent["events"]) == 2
        for name in ("profile/rank_00000.json", "memory/rank_00000.txt"):
            assert get(server, f"/file/0/{quote(str(folder / name))}")[:2] == (200, name.encode())
        for name in ("other/secret.txt", "../first/profile/rank_00000.json"):
            assert get(server, f"/file/0/{quote(str(folder / name))}")[0] == 404
            assert get(server, f"/file/0/{quote(name)}")[0] == 404


def test_a_port_that_is_in_use(run):
    runs = open_runs([str(run)])
    with serving(run) as first:
        with pytest.raises(
            ConfigurationError,
            match=f"port {first.server_port} is in use: .*--port",
        ):
            Server(runs, port=first.server_port)
    with Server(runs) as one, Server(runs) as two:
        assert two.server_port > one.server_port >= 6606
    with pytest.raises(ConfigurationError, match=r"--host 192\.0\.2\.1: "):
        Server(runs, "192.0.2.1", 0)


def test_connections_that_send_no_request(run, monkeypatch):
    """They take no more than their places, and these for a while; the page is served then."""
    monkeypatch.setattr("accelerate.monitor.server.REQUEST_SECONDS", 1.0)
    with serving(run) as server, contextlib.ExitStack() as stack:
        address = "127.0.0.1", server.server_port
        for _ in range(64):
            stack.enter_context(socket.create_connection(address)).sendall(b"GET / HTTP/1.1\r\n")
        assert poll(lambda: len(server.waiting) == 64)
        assert stack.enter_context(socket.create_connection(address, timeout=20)).recv(1) == b""
        assert poll(lambda: not server.waiting) and get(server, "/")[0] == 200


def poll(condition):
    """Whether a condition is met within 20 s."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        threading.Event().wait(0.01)
    return condition()


def test_packed_arrays_keep_what_json_has_not():
    value = {
        "a": [np.array([[1.0, np.nan], [np.inf, 2.0]])],
        "b": float("nan"),
        "c": {"d": np.arange(3)},
    }
    (found,) = unpacked(packed("1", [value]))["runs"]
    assert np.array_equal(found["a"][0], value["a"][0], equal_nan=True) and found["b"] is None
    assert found["c"]["d"].tolist() == [0, 1, 2]
