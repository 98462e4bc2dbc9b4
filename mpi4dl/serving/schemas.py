"""What may be asked: the fields of OpenAI's requests that have an effect here, with their types and ranges.

Fields that are not named here are ignored, as by other servers that speak this protocol, except for those that would
change the answer: they are refused in words.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mpi4dl.generation.requests import LARGEST_SEED, Sampling
from mpi4dl.serving.errors import ApiError

MOST_STOPS, LONGEST_STOP = 4, 256
MOST_CHOICES = 128
MOST_PROMPTS = 1024
MOST_MESSAGES = 4096

Token = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1)]
# One error for a list of a hundred thousand wrong members is enough.
Prompt = (
    str
    | Tokens
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
)
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]

# Names of fields that would change the answer and are not supported, and the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}

# Of what may be of several types, pydantic would tell why it is none of them.
RULES = {
    "prompt": f"prompt must be a text, a list of 1 to {MOST_PROMPTS} texts, a list of tokens (integers from 0), "
    "or a list of such lists, none of which is empty",
    "stop": f"stop must be a text, or a list of up to {MOST_STOPS}, of 1 to {LONGEST_STOP} characters each",
    "messages": f"messages must be a list of 1 to {MOST_MESSAGES}, each with a role (system, developer, user, "
    'assistant) and a content: a text, or a list of {"type": "text", "text": ...}',
}


class StreamExtras(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class Asked(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), le=LARGEST_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamExtras = StreamExtras()

    @property
    def tokens_asked(self) -> int | None:
        """How many tokens are wanted at most, if that was said."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with how many tokens there were."""
        return self.stream_options.include_usage

    def sampling(self, max_tokens: int, choice: int, stop: tuple[str, ...] = ()) -> Sampling:
        """How the tokens of this choice of several are drawn; each of them has a seed of its own."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed is None else (self.seed + choice) % (LARGEST_SEED + 1),
            stop=stops + stop,
        )


class CompletionRequest(Asked):
    """The body of /v1/completions."""

    prompt: Prompt
    echo: bool = False
    logprobs: Literal[0] | None = None


class TextPart(BaseModel):
    """A part of a message: text is all that there may be."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """What one side said."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False

    @property
    def tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


A = TypeVar("A", bound=Asked)


def checked(kind: type[A], body: dict[str, Any]) -> A:
    """`body` as a request of this kind. Raises ApiError about the first field that is wrong."""
    for name, nothing in NOT_SUPPORTED.items():
        if name in body and body[name] not in nothing:
            allowed = " or ".join(map(repr, nothing))
            message = f"{name} is not supported: leave it away{f', or send {allowed}' if nothing else ''}"
            raise ApiError(400, message, name, "unsupported_parameter")
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Behind the field's name come numbers, and names of types that are tried: only numbers help a reader.
        field, *places = first["loc"]
        where = f"{field}{''.join(f'[{place}]' for place in places if isinstance(place, int))}"
        raise ApiError(400, RULES.get(str(field), f"{where}: {first['msg']}"), str(field)) from None
    return asked
