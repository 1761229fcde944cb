"""What lies in the folder: frozen, since an older store is read for ever."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpkit import ToolCall
from cpkit_file import FileCheckpointer

Store = FileCheckpointer[Any]

T = "2026-11-21T03:34:05.123456Z"

MARK = b'{"cpkit":"file","version":1}\n'
LOG = f'''\
{{"thread":"t","log":"0123456789abcdef","at":null}}
{{"created":"{T}","at":null}}
{{"add":{{"role":"user","content":"h\u00e9llo\\u0000"}},"at":[1,"{T}"]}}
{{"add":[{{"n":1.0}},{{"n":100000000000000000000}}],"lengths":[9,27],"at":[3,"{T}"]}}
{{"extra":{{"plan":null,"a b":["x"]}},"lengths":[6,4,5,5],"at":[3,"{T}"]}}
{{"call":{{"call_id":"c1","tool_name":"pay","idempotency_key":"k1","attempt":1,\
"status":"issued","issued_at":"{T}"}},"args":{{"amount":10}},"at":[3,"{T}"]}}
{{"call":{{"call_id":"c1","status":"failed","resolved_at":"{T}"}},\
"result":"busy","at":[3,"{T}"]}}
{{"call":{{"call_id":"c2","tool_name":"pay","idempotency_key":"k1","attempt":2,\
"status":"issued","issued_at":"{T}"}},"args":{{"amount":10}},"at":[3,"{T}"]}}
{{"call":{{"call_id":"c2","status":"completed","resolved_at":"{T}"}},\
"result":{{"ok":true}},"at":[3,"{T}"]}}
{{"call":{{"call_id":"c3","tool_name":"ask","idempotency_key":"k2","attempt":1,\
"status":"issued","issued_at":"{T}"}},"args":{{}},"at":[3,"{T}"]}}
'''
ERASED = f'''\
{{"thread":"t","log":"0123456789abcdef","at":null}}
{{"call":{{"call_id":"c1","tool_name":"pay","idempotency_key":"k1","attempt":1,\
"status":"failed","issued_at":"{T}","resolved_at":"{T}","erased":true}},"at":null}}
{{"call":{{"call_id":"c2","tool_name":"pay","idempotency_key":"k1","attempt":2,\
"status":"completed","issued_at":"{T}","resolved_at":"{T}","erased":true}},"at":null}}
{{"call":{{"call_id":"c3","tool_name":"ask","idempotency_key":"k2","attempt":1,\
"status":"issued","issued_at":"{T}","erased":true}},"at":null}}
{{"call":{{"call_id":"c3","status":"completed","resolved_at":"{T}"}},"at":null}}
{{"created":"{T}","at":null}}
{{"add":{{}},"at":[1,"{T}"]}}
'''
NAME = "t~e3b98a4da31a127d4bde6e43033f66ba274cab0eb7eb1c70ec41402bf6273dd8.jsonl"
LINKS = {
    "claims/2/29f7ab04eb0dfd6c2cb6e40fa06e6a4ac3ac8e3bcd9e6b6bd3a1ac44d7ee9ea3.1": ...,
}


async def fill(cp: Store) -> None:
    await cp.append("t", [{"role": "user", "content": "héllo\0"}])
    await cp.append("t", [{"n": 1.0}, {"n": 10**20}])
    await cp.save_extra("t", {"plan": None, "a b": ["x"]})
    await cp.record_issued("t", ToolCall("c1", "pay", {"amount": 10}, "k1"))
    await cp.record_result("t", "c1", "busy", success=False)
    await cp.record_issued("t", ToolCall("c2", "pay", {"amount": 10}, "k1"))
    await cp.record_result("t", "c2", {"ok": True})
    await cp.record_issued("t", ToolCall("c3", "ask", {}, "k2"))


def frozen(text: str) -> str:
    """Put fixed times and words in the place of those that differ from run to run."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", T, text)
    return re.sub(r'"log":"[0-9a-f]{16}"', '"log":"0123456789abcdef"', text)
