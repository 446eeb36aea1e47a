"""Merkle trees over records, in constant memory: the root that an invoice carries and the proof that a receipt needs.

Hashing is that of Certificate Transparency (RFC 6962 §2.1, SHA-256): a leaf is H(0x00 ‖ record), a node H(0x01 ‖ left ‖
right), and a tree of n leaves splits at the largest power of two below n. The empty tree is H("").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


def leaf_hash(record: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + record).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class MerkleTree:
    """Takes leaves one by one and keeps one hash for each set bit of their number: O(log n) memory."""

    def __init__(self) -> None:
        self.size = 0
        self._peaks: list[bytes] = []

    def add(self, record: bytes) -> None:
        hash_, position = leaf_hash(record), self.size
        while position & 1:
            hash_ = node_hash(self._peaks.pop(), hash_)
            position >>= 1
        self._peaks.append(hash_)
        self.size += 1

    def root(self) -> bytes:
        if not self._peaks:
            return hashlib.sha256(b"").digest()
        *rest, hash_ = self._peaks
        for peak in reversed(rest):
            hash_ = node_hash(peak, hash_)
        return hash_


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """The audit path of one leaf: with the record and these, anyone can recompute the root."""

    index: int
    size: int
    path: tuple[bytes, ...]


def prove_inclusion_of(leaf_hashes: Sequence[bytes], index: int) -> tuple[InclusionProof, bytes]:
    """The proof for the leaf at `index`, and the root, from the hashes of all leaves."""
    path: list[bytes] = []
    root = _walk(leaf_hashes, 0, len(leaf_hashes), index, path)
    return InclusionProof(index, len(leaf_hashes), tuple(path)), root


def verify_inclusion(record: bytes, proof: InclusionProof, root: bytes) -> bool:
    """RFC 9162 §2.1.3.2."""
    if not 0 <= proof.index < proof.size:
        return False
    node, last, hash_ = proof.index, proof.size - 1, leaf_hash(record)
    for sibling in proof.path:
        if last == 0:
            return False
        if node & 1 or node == last:
            hash_ = node_hash(sibling, hash_)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            hash_ = node_hash(hash_, sibling)
        node, last = node >> 1, last >> 1
    return last == 0 and hash_ == root


def _walk(hashes: Sequence[bytes], start: int, end: int, index: int, path: list[bytes]) -> bytes:
    """The root of hashes[start:end]; appends the siblings on the way to `index`, leaf upwards, when it lies inside."""
    if end - start == 1:
        return hashes[start]
    split = start + (1 << ((end - start - 1).bit_length() - 1))
    left = _walk(hashes, start, split, index, path)
    right = _walk(hashes, split, end, index, path)
    if start <= index < end:
        path.append(right if index < split else left)
    return node_hash(left, right)
