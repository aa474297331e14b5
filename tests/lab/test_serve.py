"""`nemo-rod status --serve` is local, rebuilds after progress, and survives a damaged file."""

import json
import socket
import struct
import threading
import time
import urllib.request

import pytest
from command_line import composed

from nemo_rod.lab.report.serve import keep_fresh, serve, serve_run
from nemo_rod.run.launch.local import Local
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.stage_log import StageLog


class Ended(Exception):
    pass


def test_only_the_index_page_reloads_itself_and_nothing_is_cached(tmp_path):
    for name in ("index.html", "curriculum.html"):
        (tmp_path / name).write_text(name)
    server = serve(tmp_path, port=0, every=9)
    host, port = server.server_address[:2]
    assert host == "127.0.0.1"
    for path, refresh in (("", "9"), ("index.html", "9"), ("curriculum.html", None)):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
            assert answer.headers["Refresh"] == refresh
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.read().decode() == (path or "index.html")
    server.shutdown()


def test_a_browser_that_leaves_is_no_error(tmp_path, capfd):
    (tmp_path / "index.html").write_bytes(b"x" * 10_000_000)
    server = serve(tmp_path, port=0, every=9)
    for ask in (b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n", b"GET / HT"):
        left = socket.create_connection(("127.0.0.1", server.server_address[1]))
        left.sendall(ask)
        time.sleep(0.2)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left.close()  # with a reset
    time.sleep(0.3)
    server.shutdown()
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed("recipe=toy", "arms=[rod]")
    write_files(launch_folder(config), Local().render(config, []))
    server = serve(tmp_path, port=0, every=9)
    port = server.server_address[1]
    with pytest.raises(ValueError, match=f"port={port} cannot be had .*: choose another, or 0"):
        serve_run(tmp_path / "runs" / "toy", port=port, every=9, trusted=False)
    server.shutdown()


def test_it_rebuilds_only_after_progress_of_the_run(tmp_path, capsys):
    metrics = tmp_path / "arms" / "rod.partial" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    built: list[int] = []
    events = iter(["", "step", "", "broken", "", "end"])

    def build() -> None:
        built.append(len(metrics.read_text().splitlines()) if metrics.exists() else 0)
        if metrics.exists() and "broken" in metrics.read_text():
            metrics.write_text("repaired, and longer\n")
            raise ValueError("metrics.jsonl has no JSON in line 1")

    def sleep(seconds: float) -> None:
        event = next(events)
        if event == "end":
            raise Ended
        if event:
            metrics.write_text(json.dumps({event: 1}) + "\n")

    with pytest.raises(Ended):
        keep_fresh(tmp_path, build, every=0, sleep=sleep)
    assert built == [0, 1, 1, 1]  # first, after the step, when broken, and once more after that
    assert "has no JSON in line 1" in capsys.readouterr().err


def test_a_report_waits_for_another_in_progress(tmp_path):
    """The server and the run itself write the same files."""
    building, waiting = StageLog(tmp_path, "report"), StageLog(tmp_path, "report")
    ended: list[float] = []

    def build() -> None:
        with building.only_one():
            begun.set()
            time.sleep(0.5)
            ended.append(time.monotonic())

    begun = threading.Event()
    thread = threading.Thread(target=build)
    thread.start()
    begun.wait()
    with pytest.raises(ValueError, match="running report"), waiting.only_one():
        pass
    with waiting.only_one(patience=60.0):
        assert ended and time.monotonic() >= ended[0]
    thread.join()
