"""What sharing a tokenizer between threads and forks needs."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from noria.files.model import TokenizerFiles
from noria.text.tokenizer import load_tokenizer
from text.strings import STRINGS
from text.vocabularies import small_gguf_vocabulary

FORKS = """
import os, sys, threading
sys.path[:0] = sys.argv[1:]
from text.vocabularies import small_gguf_vocabulary
from noria.files.model import TokenizerFiles
from noria.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(TokenizerFiles(vocabulary=small_gguf_vocabulary()))
tokenizer.encode("abc " * 10000)
child = os.fork()
if child == 0:
    os._exit(0 if tokenizer.encode("abc") else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_threads_may_mix_both_ways_of_encoding_and_decoding() -> None:
    tokenizer = load_tokenizer(TokenizerFiles(vocabulary=small_gguf_vocabulary()))

    def both(string: str) -> tuple[list[int], list[int], str]:
        ids = tokenizer.encode(string)
        return ids, tokenizer.encode(string, parse_special=False), tokenizer.decode(ids)

    expected = [both(string) for string in STRINGS]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(both, STRINGS * 5)) == expected * 5


def test_a_fork_after_use_is_silent() -> None:
    paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *paths], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
