"""What Anthropic's clients read of limits: `anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}`. Pure.

Source: https://docs.anthropic.com/en/api/rate-limits (Response headers). A reset is an instant there, in RFC 3339.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from proxy.asgi import Headers

_OURS = re.compile(rb"x-ratelimit-(limit|remaining|reset)-(requests|tokens)")
_DURATION = re.compile(rb"(?:(\d+)h)?(?:(\d+)m)?(?:([\d.]+)s)?")


def limit_headers(headers: Headers, now_ms: int) -> Headers:
    """The same numbers as the `x-ratelimit-*` among `headers`."""
    found: Headers = []
    for name, value in headers:
        match = _OURS.fullmatch(name)
        if match is not None:
            what, metric = match.groups()
            told = _instant(now_ms + duration_ms(value)) if what == b"reset" else value
            found.append((b"anthropic-ratelimit-%b-%b" % (metric, what), told))
    return found


def duration_ms(text: bytes) -> int:
    """What `policies.quotas.format_duration` wrote."""
    if text.endswith(b"ms"):
        return int(text[:-2])
    match = _DURATION.fullmatch(text)
    assert match is not None, text
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return round(((hours * 60 + minutes) * 60 + seconds) * 1_000)


def _instant(at_ms: int) -> bytes:
    """The next whole second: nobody is told to come too early."""
    return datetime.fromtimestamp(-(-at_ms // 1_000), UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
