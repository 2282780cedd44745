"""The output file: after a crash, and for whom it may be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.agentic.replay.outcome import ErrorKind, Outcome
from benchmark.agentic.replay.sink import CannotResume, Header, Sink, load, resume, sha256

HEADER = Header({"seed": 0, "speed": 1.0}, "abc")


def outcome(index: int, error: ErrorKind | None = None) -> Outcome:
    return Outcome(
        index=index,
        prompt_tokens=9,
        wanted_tokens=2,
        trace_new_tokens=9,
        request_class="WARM",
        scheduled_s=1.0,
        started_s=1.0,
        finished_s=2.0,
        late_s=0.0,
        e2e_s=1.0,
        error=error,
    )


def written(path: Path, count: int = 3) -> bytes:
    with Sink(path, HEADER) as sink:
        for index in range(count):
            sink.write(outcome(index))
    return path.read_bytes()


@pytest.mark.parametrize("end", range(1, 60, 7))
def test_a_torn_line_is_dropped_and_sent_again(tmp_path: Path, end: int) -> None:
    """Guards against a file that one crash makes unreadable, and against a resumed run that glues
    its first line to the torn one."""
    path = tmp_path / "out.jsonl"
    whole = written(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[: last + end])
    earlier = resume(path, HEADER)
    assert sorted(earlier.outcomes) == [0, 1]
    assert (earlier.whole_bytes, earlier.torn_bytes) == (last, end)
    with Sink(path, HEADER, earlier) as sink:
        sink.write(outcome(2))
    assert path.read_bytes() == whole


def test_a_line_without_its_end_is_torn_even_if_it_reads_well(tmp_path: Path) -> None:
    """Guards against two objects in one line: the crash took only the line end."""
    path = tmp_path / "out.jsonl"
    whole = written(path)
    path.write_bytes(whole[:-1])
    assert sorted(load(path).outcomes) == [0, 1]


def test_a_torn_header_begins_again(tmp_path: Path) -> None:
    """Guards against a run that crashed at once and can neither be resumed nor started."""
    path = tmp_path / "out.jsonl"
    whole = written(path, 0)
    path.write_bytes(whole[:20])
    earlier = resume(path, HEADER)
    assert earlier.header is None
    with Sink(path, HEADER, earlier):
        pass
    assert path.read_bytes() == whole


def test_damage_in_the_middle_is_no_crash_of_ours(tmp_path: Path) -> None:
    """Guards against results that go missing without a word."""
    path = tmp_path / "out.jsonl"
    lines = written(path).splitlines(keepends=True)
    lines[2] = lines[2][:10] + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="line 3"):
        load(path)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    """Guards against a file of two experiments."""
    path = tmp_path / "out.jsonl"
    written(path)
    for header, text in (
        (Header({"seed": 1, "speed": 1.0}, "abc"), "--seed was 0, is 1"),
        (Header({"seed": 0, "speed": 1.0, "think_seconds": 2}, "abc"), "--think-seconds was None"),
        (Header(HEADER.settings, "abd"), "trace file has other contents"),
    ):
        with pytest.raises(CannotResume, match=text):
            resume(path, header)
    assert sorted(resume(path, HEADER).outcomes) == [0, 1, 2]


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    """Guards against hours of results lost to a command that was repeated without --resume."""
    path = tmp_path / "out.jsonl"
    whole = written(path)
    with pytest.raises(FileExistsError):
        Sink(path, HEADER)
    assert path.read_bytes() == whole


def test_of_a_repeated_request_the_later_line_counts(tmp_path: Path) -> None:
    """Guards --retry-errors: the failure is replaced, and not counted next to the answer."""
    path = tmp_path / "out.jsonl"
    with Sink(path, HEADER) as sink:
        sink.write(outcome(0, "timeout"))
        sink.write(outcome(0))
    assert [o.error for o in load(path).outcomes.values()] == [None]


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a replay that goes on while its results are lost: the kernel then writes a
    part of the line."""
    with Sink(tmp_path / "out.jsonl", HEADER) as sink:
        monkeypatch.setattr("os.write", lambda _, data: len(data) - 1)
        with pytest.raises(OSError, match="bytes were written"):
            sink.write(outcome(0))


def test_hash_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"abc")
    assert sha256(path).startswith("ba7816bf")
