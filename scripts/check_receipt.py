#!/usr/bin/env python3
"""Check that a request is among those its month's invoice was made from..

    curl -H "Authorization: Bearer $ADMIN" $BASE/admin/v1/requests/$ID | python check_receipt.py --root $ROOT_ON_INVOICE

Reads `receipt` from the answer, recomputes the Merkle root (RFC 6962, SHA-256) from the record and its path, and
compares it with the root printed on the invoice. Exit code 0: included; 1: not; 2: not a receipt.
"""

import argparse
import hashlib
import json
import sys


def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_of(record: bytes, index: int, size: int, path: list[bytes]) -> bytes | None:
    """The root that this path leads to, None when the path does not fit a tree of that size (RFC 9162 §2.1.3.2)."""
    hash_, last = hashlib.sha256(b"\x00" + record).digest(), size - 1
    if not 0 <= index < size:
        return None
    for sibling in path:
        if last == 0:
            return None
        if index & 1 or index == last:
            hash_ = node(sibling, hash_)
            while index and not index & 1:
                index, last = index >> 1, last >> 1
        else:
            hash_ = node(hash_, sibling)
        index, last = index >> 1, last >> 1
    return hash_ if last == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=argparse.FileType(), default=sys.stdin, help="default: standard input")
    parser.add_argument("--root", help="the Merkle root on the invoice; without it, the receipt's own is taken")
    arguments = parser.parse_args()
    try:
        answer = json.load(arguments.file)
        receipt = answer.get("receipt", answer)
        record, path = bytes.fromhex(receipt["record"]), [bytes.fromhex(part) for part in receipt["path"]]
        computed = root_of(record, int(receipt["index"]), int(receipt["size"]), path)
        expected = bytes.fromhex(arguments.root or receipt["root"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"not a receipt: {error!r}", file=sys.stderr)
        return 2
    included = computed == expected
    print(
        f"{receipt.get('request_id', 'request')}: {'included' if included else 'NOT included'} under {expected.hex()}"
    )
    return 0 if included else 1


if __name__ == "__main__":
    sys.exit(main())
