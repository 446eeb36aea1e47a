"""What makes rounds faster changes nothing else: large pages, and blocks that go on with the text."""

from __future__ import annotations

import os

import torch

from backend import pages
from backend.drafts import DraftJob, NgramDraft, NgramThenModelDraft
from backend.sequence import Request
from backend.sequence import Sequence as Running
from tests.backend.families import ScriptedDraft, digits

_SMAPS = """\
55e0000000-55e0800000 rw-p 00000000 00:00 0                              [heap]
Size:               8192 kB
Rss:                8000 kB
VmFlags: rd wr mr mw me ac
7f00000000-7f00400000 rw-p 00000000 00:00 0
Rss:                4096 kB
VmFlags: rd wr mr mw me ac nh
7f10000000-7f10400000 rw-p 00000000 08:01 99                             /usr/lib/libx.so
Rss:                4096 kB
VmFlags: rd wr mr mw me ac
7f20000000-7f20400000 r--p 00000000 00:00 0
Rss:                4096 kB
VmFlags: rd mr mw me
7f30000000-7f30400000 rw-p 00000000 00:00 0
Rss:                 512 kB
VmFlags: rd wr mr mw me ac hg
"""


def test_large_pages_are_asked_for_what_is_private_and_not_for_keys_and_values() -> None:
    found = [(mapping.start, mapping.end, mapping.used) for mapping in pages._mappings(_SMAPS)]
    assert found == [(0x55E0000000, 0x55E0800000, 8000 << 10), (0x7F30000000, 0x7F30400000, 512 << 10)]


def test_moving_memory_to_large_pages_changes_nothing_in_it() -> None:
    before = torch.arange(1 << 21)  # 16 MB
    asked = pages.use_large_pages()
    assert torch.equal(before, torch.arange(1 << 21))
    assert asked == 0 if os.uname().sysname != "Linux" else asked % (2 << 20) == 0


def test_a_drafted_block_goes_on_with_the_text_where_it_leads_to_known_words() -> None:
    sequence = Running(Request("a", [1, 2, 3, 4, 5, 6, 9, 1], 20), digits)
    sequence.slot = 0
    model = ScriptedDraft({"a": [2, 3, 7, 7, 7]})  # 1 2 3 is known: the text went on with 4 5 6
    assert NgramThenModelDraft(model).propose([DraftJob(sequence, 5)]) == [[2, 3, 4, 5, 6]]
    assert NgramThenModelDraft(model).propose([DraftJob(sequence, 3)]) == [[2, 3, 4]]
    assert NgramDraft(4, 3).corrected(sequence, [8, 8, 8]) == [8, 8, 8]
