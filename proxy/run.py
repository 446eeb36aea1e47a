"""A request that may pass, and a request that runs: the values that travel through the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from ledger.gate import Ask, Hold, Spender
from ledger.records import FailedAttempt
from policies.access import Principal
from policies.drafts import Speculation
from policies.quotas import Ticket
from proxy.asgi import Headers, Reply
from proxy.counting import Counting
from proxy.metering import Settled
from proxy.openai.dialects import Dialect
from proxy.openai.requests import Call, prompt_text
from proxy.openai.usage import acceptance_rate
from proxy.routing import Deployment, Draft, Route
from proxy.watch import Watch

DEFAULT_PLAIN_OUTPUT_TOKENS = 16_384
"""Held for a plain answer when neither the client nor the configuration limits it."""
MAX_OUTPUT_TOKENS = 1_000_000
"""The same for a stream, which is paid for as it grows, and for who asks for more: this ends what never ends."""


@dataclass(slots=True)
class Request:
    """One request that may pass: what is known of it before money is set aside."""

    id: str
    at_ms: int
    dialect: Dialect
    call: Call
    principal: Principal
    route: Route
    speculation: Speculation
    headers: dict[bytes, bytes]
    once: tuple[str, str] | None = None
    """Its Idempotency-Key and the hash of its body."""

    @property
    def named_draft(self) -> Draft:
        """The draft that the client itself asked for, False where it wants none, None where it leaves that to us."""
        if self.speculation.mode == "disabled":
            return False
        return self.speculation.draft if b"x-draft-model" in self.headers else None

    @property
    def output_limit(self) -> int:
        """Per choice: what the client asked for, else the model's limit."""
        asked = self.call.max_output_tokens
        default = DEFAULT_PLAIN_OUTPUT_TOKENS if asked is None and not self.extends else MAX_OUTPUT_TOKENS
        known = self.route.settings.max_output_tokens or default
        return known if asked is None else min(asked, known)

    @property
    def extends(self) -> bool:
        """Whether its hold grows with the answer; what cannot be cut while it runs is held whole."""
        return self.call.streamed and self.call.choices == 1

    @property
    def prompt_tokens_bound(self) -> int:
        context = self.route.settings.context_tokens
        bound = self.call.prompt_tokens_bound
        return bound if context is None else min(bound, context)

    def ask(self, deployment: Deployment) -> Ask:
        """What it may cost at most; `deployment` is the first that will be asked."""
        call, principal = self.call, self.principal
        spender = Spender(
            principal.team_id, principal.key_id, call.end_user, principal.billing_currency, principal.timezone
        )
        return Ask(
            self.id,
            self.at_ms,
            spender,
            call.model,
            self.prompt_tokens_bound,
            self.output_limit * call.choices,
            self.extends,
            deployment.name,
            *(self.once or (None, None)),
        )


@dataclass(slots=True)
class Run:
    """One request that runs: its hold, its patience, and what became of it so far."""

    request: Request
    hold: Hold
    ticket: Ticket
    watch: Watch
    reply: Reply
    deployment: Deployment | None = None
    attempts: int = 0
    failed_attempts: list[FailedAttempt] = field(default_factory=list)
    """Those that cost us something."""
    draft_model: str | None = None
    settled: bool = False
    """Its money is decided: charged, or free again."""

    @property
    def leaves_a_row(self) -> bool:
        """Whether it is on record when its client leaves before it got anything: somebody was asked. One with an
        Idempotency-Key is as if it had never been, so that its client can try again under the same key."""
        return self.attempts > 0 and self.request.once is None

    _counted: dict[Counting, int] = field(default_factory=dict)

    def prompt_tokens(self, counting: Counting) -> int:
        """Our own count of the prompt, made once however often it is asked for. Slow where the prompt is long."""
        if counting not in self._counted:
            self._counted[counting] = counting.prompt_tokens(prompt_text(self.request.call.fields))
        return self._counted[counting]

    @property
    def dialect(self) -> Dialect:
        """As the deployment that is asked speaks it."""
        dialect = self.request.dialect
        return dialect if self.deployment is None else dialect.at(self.deployment.upstream.native)

    def lowered_limit(self) -> int | None:
        """The most tokens per choice to ask for, where the hold covers fewer than the client would get; else None.

        What cannot be cut while it runs must not run past what is held: nobody might pay for that.
        """
        request, asked, choices = self.request, self.request.call.max_output_tokens, self.request.call.choices
        wanted = request.output_limit if asked is None else asked
        if request.extends or self.hold.output_tokens >= wanted * choices:
            return None
        return max(1, self.hold.output_tokens // choices)

    def headers(self, settled: Settled | None = None) -> Headers:
        """What the response says of the deployment, the limits and, once it is settled, the cost."""
        deployment = self.deployment
        assert deployment is not None
        headers = [
            (b"x-tallygate-deployment", deployment.name.encode("latin-1", "replace")),
            (b"x-tallygate-draft-model", (self.draft_model or "none").encode("latin-1", "replace")),
        ]
        headers += [(name.encode(), value.encode()) for name, value in self.ticket.headers().items()]
        if settled is not None:
            headers.append((b"x-tallygate-cost-usd", settled.cost_usd))
            headers.append((b"x-tallygate-cost-cny", settled.cost_cny))
            rate = acceptance_rate(settled.tokens)
            if rate is not None:
                headers.append((b"x-tallygate-acceptance-rate", rate.encode()))
        return self.request.dialect.head(headers)
