"""A run on a terminal: a line of progress replaces the one before; elsewhere, all are printed."""

import io

import pytest

from nemo_rod.commands.text import Lines


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_line_of_progress_takes_the_place_of_the_one_before(on_terminal: bool) -> None:
    """Not of other lines, such as a job's remarks, which are marked as progress, but are none."""
    stream, printed = io.StringIO(), ["a  1/9", "a  2/9", "rank 2: no progress for 60 s", "a  3/9"]
    stream.isatty = lambda: on_terminal  # type: ignore[method-assign]
    lines = Lines(stream)
    print("[1/2] train a", file=lines)
    for text in printed:
        print(f"progress: {text}", file=lines)
    print("[1/2] train a: 9 s\nprogress: in no first place", file=lines)
    first, again, remark, later = (f"  {text}\n" for text in printed)
    if on_terminal:  # in one piece, which never wraps
        first, again, later = (f"\033[?7l{line[:-1]}\033[?7h\n" for line in (first, again, later))
        again = f"\033[A\033[2K{again}"
    expected = ["[1/2] train a\n", first, again, remark, later, "[1/2] train a: 9 s\n"]
    assert stream.getvalue() == "".join([*expected, "progress: in no first place\n"])
