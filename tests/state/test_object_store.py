"""Checkpoints in an object store: an S3 server on loopback that fails as told (tests/state/s3_server.py)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptplan.errors import CheckpointNotFoundError, DuplicateCheckpointError, SaveFailedError, StateError
from ckptplan.state import CheckpointManager, StorageConfig, s3
from ckptplan.state.remote import StorageAttempt
from ckptplan.units import MIB
from tests.state.conftest import Bucket
from tests.state.s3_server import ACCESS_KEY, SECRET, Fault, Request

FIVE_MIB = 5 * MIB  # the least that S3 takes as a part


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", FIVE_MIB)
    monkeypatch.setattr("ckptplan.state.remote._SMALL_BYTES", FIVE_MIB)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.state.failures._FIRST_PAUSE_S", 0.01)


def state_of(value: float, size: int = 3_000_000) -> dict[str, object]:
    model = {"w": torch.full((size,), float(value)), "b": torch.full((3,), float(value))}
    return {"model": model, "small": torch.full((3,), float(value)), "step": int(value)}


def is_whole(states: CheckpointManager, name: str, value: float) -> bool:
    loaded = states.load(name)
    tensors = loaded["model"].values()
    return loaded["step"] == value and all(bool((tensor == value).all()) for tensor in tensors)


# --- faults that pass ---


@pytest.mark.parametrize("kind", ["500", "503", "reset", "lost", "cut"])
def test_a_save_and_a_load_get_over_faults_that_pass(bucket: Bucket, small_parts: None, kind: str) -> None:
    count = 0

    def every_fourth(request: Request) -> bool:
        nonlocal count
        count += 1
        return count % 4 == 0

    bucket.server.faults = [Fault(kind, every_fourth, times=1000)]
    with CheckpointManager(bucket.url, keep_last=1) as states:
        for step in (1, 2):
            states.save(f"s-{step}", state_of(step, size=1_500_000)).result()
            states.wait()
        into = state_of(0, size=1_500_000)
        states.load("latest", into=into)
        assert into["step"] == 2
        assert into["model"]["w"].eq(2).all()  # type: ignore[index]
        assert states.steps() == [2]
        bucket.server.faults = []
        assert states.verify("s-2") == []
    assert count > 20
    assert {key.split("/")[2] for key in bucket.objects()} == {"s-2"}


def test_what_the_store_has_done_before_its_answer_was_lost_counts_as_done(bucket: Bucket, small_parts: None) -> None:
    """The second try of such a request is told that the key is taken, or that the upload is gone."""

    bucket.server.faults = [
        Fault("lost", lambda request: request.method == "POST" and "uploadId=" in request.query),
        Fault("lost", lambda request: request.method == "PUT" and request.path.endswith("manifest.json")),
        Fault("lost", lambda request: request.method == "PUT" and "small.0" in request.path),
    ]
    with CheckpointManager(bucket.url) as states:
        states.save("s-1", state_of(1)).result()
        assert [fault.times for fault in bucket.server.faults] == [0, 0, 0]
        assert is_whole(states, "s-1", 1)


def test_only_the_part_that_failed_is_sent_again(bucket: Bucket, small_parts: None) -> None:
    def is_part_2(request: Request) -> bool:
        return "partNumber=2" in request.query

    bucket.server.faults = [Fault("503", is_part_2, times=2), Fault("reset", is_part_2, times=1)]
    with CheckpointManager(bucket.url) as states:
        states.save("s-1", state_of(1, size=5_000_000)).result()
    parts = [request.query.split("partNumber=")[1][0] for request in bucket.server.requests if request.is_part]
    assert sorted(parts) == ["1", "2", "2", "2", "2", "3", "4"]


def test_parts_go_up_and_come_down_several_at_a_time(bucket: Bucket, small_parts: None) -> None:
    bucket.server.faults = [Fault("slow", lambda request: request.is_part, times=100, seconds=0.3)]
    with CheckpointManager(bucket.url) as states:
        states.save("s-1", state_of(1, size=9_000_000)).result()
        assert bucket.server.most_at_once >= 4
        bucket.server.reset()
        is_data = "data-"
        bucket.server.faults = [Fault("slow", lambda request: is_data in request.path, times=100, seconds=0.2)]
        states.load("s-1")
        assert bucket.server.most_at_once >= 3


def test_a_request_without_an_answer_is_given_up_and_sent_again(bucket: Bucket) -> None:
    options = (("config_kwargs", {"read_timeout": 0.3}),)
    bucket.server.faults = [Fault("hang", lambda request: request.method in ("PUT", "GET"), times=3, seconds=2.0)]
    started = time.monotonic()
    with CheckpointManager(storage=StorageConfig(bucket.url, options)) as states:
        states.save("s-1", state_of(1, size=1000)).result()
        assert is_whole(states, "s-1", 1)
    assert time.monotonic() - started < 10


# --- faults that stay ---


def test_a_store_that_stays_down_fails_the_save_in_time_and_the_next_save_cleans_up(
    bucket: Bucket, small_parts: None
) -> None:
    with CheckpointManager(bucket.url, timeout_s=2) as states:
        states.save("s-1", state_of(1)).result()
        bucket.server.faults = [Fault("503", lambda request: "partNumber=3" in request.query, times=10**6)]
        started = time.monotonic()
        error = states.save("s-2", state_of(2)).exception()
        assert isinstance(error, SaveFailedError)
        assert "SlowDown" in str(error)
        assert time.monotonic() - started < 2 + 1
        assert bucket.uploads() == [], "what was sent is given up, so that it costs nothing"
        assert states.latest() == "s-1"
        bucket.server.faults = [Fault("503", lambda request: request.method != "GET", times=10**6)]
        assert isinstance(states.save("s-3", state_of(3)).exception(), SaveFailedError)
        bucket.server.faults = []
        states.save("s-4", state_of(4)).result()
        states.wait()
        assert states.steps() == [1, 4]
        assert {key.split("/")[2] for key in bucket.objects()} == {"s-1", "s-4"}
        assert is_whole(states, "s-4", 4)


TRAINER = """
import sys, torch
from ckptplan.state import CheckpointManager, s3, remote
s3.PART_BYTES = remote._SMALL_BYTES = 5 * 2**20
with CheckpointManager(sys.argv[1]) as states:
    for step in (1, 2):
        model = {"w": torch.full((3_000_000,), float(step)), "b": torch.full((3,), float(step))}
        states.save(f"s-{step}", {"model": model, "small": torch.full((3,), float(step)), "step": step}).result()
        print("saved", flush=True)
"""


@pytest.mark.parametrize(
    "held_at",
    [
        "partNumber=3",
        pytest.param("small.0", marks=pytest.mark.slow),
        pytest.param("manifest.json", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_killed_while_it_sends_leaves_the_checkpoint_before(bucket: Bucket, held_at: str) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, bucket.url], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    held = Fault("hang", lambda request: request.method == "PUT" and held_at in f"{request.path}?{request.query}")
    held.times, held.seconds = 0, 2.0
    bucket.server.faults = [held]
    assert trainer.stdout.readline() == "saved\n"
    held.times = 1
    for _ in range(1000):
        if held.times == 0:
            break
        time.sleep(0.01)
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    bucket.server.faults = []
    with CheckpointManager(bucket.url) as states:
        assert states.steps() == [1], "half a checkpoint is none"
        assert is_whole(states, "latest", 1)
        assert any("/s-2/data-" in f"/{key}" for key in (*bucket.objects(), *bucket.uploads())), (
            "there is something left"
        )
        states.save("s-3", state_of(3)).result()
        states.wait()
        assert {key.split("/")[2] for key in bucket.objects()} == {"s-1", "s-3"}, "and now it is gone"
        assert bucket.uploads() == []


def test_the_command_line_names_what_interrupted_saves_have_left(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptplan.state.cli import main

    with CheckpointManager(bucket.url) as states:
        states.save("s-1", state_of(1, size=10)).result()
    storage = StorageConfig(bucket.url).open()
    storage.write("s-2/data-0123456789abcdef/model.0.safetensors", [b"half"])
    assert isinstance(storage, s3.S3Storage)
    storage._request("create_multipart_upload", "s-3/data-fedcba9876543210/model.0.safetensors")
    assert main(["ls", bucket.url]) == 0
    told = capsys.readouterr().out
    assert "s-1" in told
    assert "left by an interrupted save: s-2/data-0123456789abcdef" in told
    assert "left by an interrupted save: s-3/data-fedcba9876543210/model.0.safetensors" in told


def test_nothing_of_anybody_else_below_the_location_is_a_left_over(bucket: Bucket) -> None:
    with CheckpointManager(f"{bucket.url}/other") as theirs, CheckpointManager(bucket.url) as states:
        theirs.save("s-1", state_of(1, size=10)).result()
        StorageConfig(bucket.url).open().write("notes/readme.txt", [b"mine"])
        states.save("s-1", state_of(1, size=10)).result()
        states.wait()
        assert theirs.verify("s-1") == []
        assert f"{bucket.name}/run/notes/readme.txt" in bucket.objects()


@pytest.mark.parametrize("where", ["_write_file", "_part", "_commit"])
def test_a_save_that_another_of_the_same_id_overtakes_is_told_so_wherever_it_is(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The winner takes the files of the other for an earlier attempt's and deletes them: what fails is any request."""
    overtaken = []
    original = getattr(StorageAttempt, where)

    def overtake(attempt: StorageAttempt, *arguments: Any) -> Any:
        if not overtaken:
            overtaken.append(True)
            with CheckpointManager(bucket.url, mode="sync") as others:
                others.save("s-1", state_of(2, size=10)).result()
                others.wait()
        return original(attempt, *arguments)

    monkeypatch.setattr(StorageAttempt, where, overtake)
    with CheckpointManager(bucket.url, mode="sync") as states:
        error = states.save("s-1", state_of(1, size=10)).exception()
        assert type(error) is DuplicateCheckpointError, error
        states.wait()
        assert is_whole(states, "s-1", 2)
        assert len({key.split("/")[3] for key in bucket.objects() if "/data-" in key}) == 1


def test_what_was_at_work_when_another_save_began_and_is_committed_when_it_ends_stays(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StorageAttempt._commit
    saved = []

    def commit_after_another_began(attempt: StorageAttempt, manifest: bytes) -> None:
        """The first save has written its files, when the second looks for left-overs; it commits before that cleans."""
        if not saved:
            saved.append("s-1")
            monkeypatch.setattr(StorageAttempt, "clean_up", lambda attempt: to_clean.append(attempt) or [])
            with CheckpointManager(bucket.url, mode="sync") as others:
                others.save("s-2", state_of(2, size=10)).result()
        original(attempt, manifest)

    to_clean: list[StorageAttempt] = []
    clean_up = StorageAttempt.clean_up
    monkeypatch.setattr(StorageAttempt, "_commit", commit_after_another_began)
    with CheckpointManager(bucket.url, mode="sync") as states:
        states.save("s-1", state_of(1, size=10)).result()
        assert any("s-1/data-" in left for attempt in to_clean for left in attempt.control["clean_up"])
        assert [clean_up(attempt) for attempt in to_clean] == [[], []]
        assert states.verify("s-1") == states.verify("s-2") == []


def test_of_two_that_save_the_same_id_one_is_told_so(bucket: Bucket) -> None:
    both = threading.Barrier(2)
    errors: list[BaseException | None] = []

    def save(value: float) -> None:
        with CheckpointManager(bucket.url, mode="sync") as states:
            both.wait()
            errors.append(states.save("s-1", state_of(value, size=10)).exception())

    threads = [threading.Thread(target=save, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(error) for error in errors if error is not None) == [DuplicateCheckpointError]
    with CheckpointManager(bucket.url) as states:
        assert states.verify("s-1") == []


# --- what the user got wrong ---


def test_a_bucket_that_is_not_there_is_said_so(bucket: Bucket) -> None:
    with CheckpointManager("s3://no-such-bucket-here/run", timeout_s=5) as states:
        for failure in (lambda: states.claim(), lambda: states.load("latest")):
            with pytest.raises((OSError, StateError), match="there is no such bucket"):
                failure()
        assert "there is no such bucket" in str(states.save("s-1", {"x": 1}).exception())


def test_missing_credentials_are_said_so(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with CheckpointManager(bucket.url, timeout_s=5) as states:
        error = states.save("s-1", {"x": 1}).exception()
        assert isinstance(error, SaveFailedError)
        assert "no credentials" in str(error)
        assert "AWS_ACCESS_KEY_ID" in str(error)


def test_a_right_that_is_missing_is_said_so_and_not_asked_for_again(bucket: Bucket) -> None:
    bucket.server.faults = [Fault("403", lambda request: request.method == "PUT", times=10**6)]
    with CheckpointManager(bucket.url) as states:
        error = states.save("s-1", {"x": 1}).exception()
        assert isinstance(error, SaveFailedError)
        assert "not allowed" in str(error)
        with pytest.raises(PermissionError, match="not allowed"):
            states.claim()
    assert len(bucket.server.of("PUT")) <= 3


def test_a_wrong_endpoint_is_given_up_soon(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("ckptplan.state.failures._LONGEST_FIRST_S", 0.5)
    started = time.monotonic()
    with (
        CheckpointManager(bucket.url) as states,
        pytest.raises(OSError, match=r"the connection failed .*127\.0\.0\.1:9"),
    ):
        states.claim()
    assert time.monotonic() - started < 5


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ImportError, match=r"s3://bucket/run: .*pip install -e '\.\[s3\]'"):
        CheckpointManager("s3://bucket/run")


def test_a_protocol_that_nobody_knows_is_said_so() -> None:
    with pytest.raises(ValueError, match=r"s4://bucket/run: Protocol not known: s4"):
        CheckpointManager("s4://bucket/run")


def test_secrets_reach_neither_the_store_nor_a_log_nor_a_message(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = StorageConfig(bucket.url, (("key", ACCESS_KEY), ("secret", SECRET)))
    caplog.set_level(logging.DEBUG, logger="ckptplan")
    bucket.server.faults = [Fault("403", lambda request: request.path.endswith("s-2/manifest.json"), times=10**6)]
    with CheckpointManager(storage=config) as states:
        states.save("s-1", state_of(1, size=10)).result()
        error = states.save("s-2", state_of(1, size=10)).exception()
        assert isinstance(error, SaveFailedError)
        shown = [str(error), repr(config), repr(states.config), caplog.text]
        storage = config.open()
        shown += [storage.read(key.partition("/run/")[2]).decode("latin-1") for key in bucket.objects()]
    assert len(shown) > 4
    assert not any(SECRET in text or ACCESS_KEY in text for text in shown)
    with pytest.raises(ValueError, match="a URL with a password") as told:
        StorageConfig(f"s3://me:{SECRET}@bucket/run")
    assert SECRET not in str(told.value)


# --- how much is read ---


def test_loading_ten_of_two_hundred_tensors_reads_their_bytes_and_little_more(bucket: Bucket) -> None:
    size = 65_536
    with CheckpointManager(bucket.url) as states:
        states.save("s-1", {"model": {f"t{i}": torch.full((size,), float(i)) for i in range(200)}}).result()
    with CheckpointManager(bucket.url) as states:
        bucket.server.reset()
        into = {"model": {f"t{i}": torch.zeros(size) for i in range(5, 200, 20)}}
        states.load("s-1", into=into, strict=False)
        assert [float(tensor[-1]) for tensor in into["model"].values()] == list(range(5, 200, 20))
    gets = bucket.server.of("GET")
    assert sum(request.sent_bytes for request in gets) <= 1.1 * 10 * 4 * size, "the manifest and listings counted"
    assert len(bucket.server.requests) <= 2 * 10


def test_a_whole_load_reads_each_byte_once_in_few_requests(bucket: Bucket) -> None:
    state = {"model": {f"t{i}": torch.full((1000,), float(i)) for i in range(500)}, "big": torch.ones(5_000_000)}
    with CheckpointManager(bucket.url) as states:
        states.save("s-1", state).result()
        bucket.server.reset()
        states.load(
            "s-1", into={"model": {f"t{i}": torch.zeros(1000) for i in range(500)}, "big": torch.zeros(5_000_000)}
        )
    read = sum(request.sent_bytes for request in bucket.server.of("GET", "data-"))
    assert read <= 1.03 * (500 * 4000 + 20_000_000)
    assert len(bucket.server.requests) <= 12


# --- copies on this machine ---


def test_the_second_load_of_a_checkpoint_reads_its_tensors_from_the_cache(bucket: Bucket, tmp_path: Path) -> None:
    config = StorageConfig(bucket.url, cache=str(tmp_path / "cache"))
    with CheckpointManager(storage=config) as states:
        states.save("s-1", state_of(1)).result()
        assert is_whole(states, "s-1", 1)
    bucket.server.reset()
    with CheckpointManager(storage=config) as states:
        assert is_whole(states, "s-1", 1)
        assert bucket.server.of("GET", "s-1/data-") == []
        part = {"model": {"b": torch.zeros(3)}}
        states.load("s-1", into=part, strict=False)
        assert part["model"]["b"].eq(1).all()
        assert bucket.server.of("GET", "s-1/data-") == [], "a part of what is there is there"
        assert states.verify("s-1") == []
        assert bucket.server.of("GET", "s-1/data-") != [], "verifying is about the store"
        states.delete("s-1")
        with pytest.raises(CheckpointNotFoundError):
            states.load("s-1")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_damaged_copy_is_dropped_and_read_again(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = StorageConfig(bucket.url, cache=str(tmp_path / "cache"))
    with CheckpointManager(storage=config) as states:
        states.save("s-1", state_of(1)).result()
        states.load("s-1")
        copy = next(path for path in (tmp_path / "cache").rglob("model.*") if path.suffix != ".ranges")
        with copy.open("r+b") as file:
            file.seek(6_000_000)
            file.write(b"\x07")
        assert is_whole(states, "s-1", 1)
        assert "damaged: it is read from the storage again" in caplog.text
        with copy.open("r+b") as file:
            file.truncate(100)
        assert is_whole(states, "s-1", 1)


def test_the_cache_keeps_to_its_limit_and_drops_what_was_not_used_for_longest(bucket: Bucket, tmp_path: Path) -> None:
    config = StorageConfig(bucket.url, cache=str(tmp_path / "cache"), cache_bytes=30_000_000)
    with CheckpointManager(storage=config) as states:
        for step in (1, 2, 3):
            states.save(f"s-{step}", state_of(step)).result()
        for step in (1, 2, 1, 3):
            states.load(f"s-{step}")
        bucket.server.reset()
        states.load("s-1")
        assert bucket.server.of("GET", "s-1/data-") == []
        states.load("s-2")
        assert bucket.server.of("GET", "s-2/data-") != []
    held = sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").rglob("*") if path.suffix == ".safetensors")
    assert held <= 30_000_000


def test_a_full_disk_under_the_cache_is_no_reason_not_to_load(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    cache = "/proc/1/nowhere" if os.geteuid() == 0 else "/nowhere"
    with CheckpointManager(storage=StorageConfig(bucket.url, cache=cache)) as states:
        states.save("s-1", state_of(1, size=10)).result()
        assert is_whole(states, "s-1", 1)
        assert "no copy of s-1/" in caplog.text
