"""Whether two answers in LaTeX are equal, decided by math-verify in a process of its own.

Of its own, since a power such as 9^{9^{9^9}} is one call into C that no signal and no thread can end; a process can be killed. It runs
this file, so it loads neither JAX nor this package.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import subprocess
import sys
from typing import IO, Any

_START_SECONDS = 120  # SymPy's import on a busy machine


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} (or \fbox{...}, or "\boxed 5") holds; None where there is none or it is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = re.sub(r"\\(boxed|fbox)\s*", "", text[start:], count=1)
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest)[0].strip() or None
    depth = 0
    for brace in re.finditer(r"\\?[{}]", rest):
        if brace[0] in "{}":  # \{ is a brace that is shown
            depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[1 : brace.start()].strip() or None
    return None


def math_equal(answer: str, reference: str, seconds: float = 10.0) -> bool:
    r"""Whether an answer states what the reference does: numbers, expressions, sets, intervals, matrices, words.

    Args:
      answer: the model's text. Its last \boxed{...} counts; where there is none, what math-verify finds: a final answer that is named
        as such, else the last formula or number.
      reference: LaTeX, as it stands inside \boxed{...}.
      seconds: after which two answers count as different.
    """
    boxed = last_boxed(answer)
    if boxed is not None and boxed == reference.strip():
        return True
    if not answer.strip() or ("\\boxed" in answer and boxed is None):
        return False
    return _comparer.ask([f"\\boxed{{{reference}}}", answer if boxed is None else f"\\boxed{{{boxed}}}"], seconds)


class _Comparer:
    """The process, started at the first question and again after each that took too long."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._stop)

    def ask(self, question: list[str], seconds: float) -> bool:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._process is None:
            # -P: the folder of this file is no place to import from; its modules have names that the standard library has too.
            command = [sys.executable, "-P", "-W", "ignore", __file__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if self._answer(_START_SECONDS) != "ready":
                self._stop()
                raise RuntimeError("the process that compares LaTeX did not start; its own error, if any, is above")
        stdin = _pipe(self._process.stdin)
        stdin.write(json.dumps(question).encode() + b"\n")
        stdin.flush()
        answer = self._answer(seconds)
        if answer is None:
            self._stop()
        return bool(answer)

    def _answer(self, seconds: float) -> Any:
        """The process's next line; None where it does not come in time or the process has ended."""
        assert self._process is not None
        stdout = _pipe(self._process.stdout)
        if not select.select([stdout], [], [], seconds)[0]:
            return None
        return json.loads(stdout.readline() or b"null")

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_comparer = _Comparer()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _serve() -> None:
    """Answers [reference, answer] on each line of the input with true or false."""
    import logging

    from math_verify import parse, verify

    logging.disable()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin.buffer:
        reference, answer = json.loads(line)
        # Its own limits work by signals; they end what they can, after 5 seconds each.
        print(json.dumps(bool(verify(parse(reference), parse(answer)))), flush=True)


if __name__ == "__main__":
    _serve()
