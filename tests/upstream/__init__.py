"""A fake provider: a real process that speaks OpenAI's wire, answers deterministically and misbehaves on request.

`python -m tests.upstream --port 9000 --log upstream.jsonl`. Which fault a request meets is said, first match wins, by
the request header `x-fault`, the body field `x_fault`, the model name (`any-name@fault`), or a standing fault set over
`POST /control`. A fault is a name of `faults.FAULTS`, or a JSON object of `faults.Fault` fields (`{"name": …}` starts
from a named one). Its log (JSON lines, one per request) says what was really produced: the oracle of billing tests.
"""
