"""What of a bound on concurrency each worker and each host gets, in words. Pure."""

from __future__ import annotations

from proxy.settings import Settings


def shares(settings: Settings) -> list[str]:
    """A line where that is not simply what is configured."""
    workers, lines = settings.server.workers, []
    places = [(f"upstreams.{name}.max_concurrency", item.max_concurrency) for name, item in settings.upstreams.items()]
    if settings.backend is not None:
        places.append(("backend.max_batch", settings.backend.max_batch))
    for path, most in places if workers > 1 else []:
        share = settings.server.share(most)
        lines.append(f"{path}: {most} on each host are {share} for each of {workers} workers, {share * workers} in all")
    if places and settings.storage.database.startswith("postgres"):
        lines.append(f"{', '.join(path for path, _ in places)}: of each host; of several hosts give each its part")
    return lines
