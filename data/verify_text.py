"""What must hold of the words of a row: replies begin and end where the target's did.

N tokens of a shard, r replies of its conversations. Plain texts have neither turns nor a template
and are left out: rows without temperature and finish whose one reply begins at position 1 and goes
on to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from spectrain.data.encode import encode
from spectrain.data.render import Refused, rendered
from spectrain.data.verify import Shard

# Short turns with different ends: what all prompts end in does not depend on them.
_TURNS = ("Hello", "12 + 30", "and so?")
# Words that switch thinking off or on in some templates, and with it the generation prompt.
_SWITCHES = ("/no_think", "/think", "detailed thinking on", "detailed thinking off")
OF_WORDS = ("replies", "tokens")  # checks of a shard that have to hold first
_ROOM = 16  # further tokens that are decoded where a prompt's ids are not the expected ones


@dataclass(frozen=True)
class Speech:
    """How the target's turns begin and end.

    stop_ids: each ends a reply; prompts: the ids that can stand before one, none: unknown
    """

    tokenizer: object
    stop_ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tokenizer, stop_ids: tuple[int, ...]) -> Speech:
        return cls(tokenizer, stop_ids, generation_prompts(tokenizer))

    @property
    def texts(self) -> tuple[str, ...]:
        """Those of `prompts`."""
        return tuple(self.tokenizer.decode(list(ids)) for ids in self.prompts)


def generation_prompts(tokenizer) -> tuple[tuple[int, ...], ...]:
    """What the chat template puts before a reply: behind a user turn, behind a result of a tool,
    with thinking switched on and off. Empty where it cannot be told: without a template, or where
    the template puts nothing there."""
    if not tokenizer.chat_template:
        return ()
    found = set()
    for place, talks in enumerate(_situations()):
        try:
            ids = _before_reply(tokenizer, talks)
        except Refused:
            if place == 0:
                return ()
            continue  # there are no such rows
        if not ids:
            return ()
        found.add(ids)
    return tuple(sorted(found))


def _situations() -> Iterator[list[list[dict]]]:
    """Talks that differ in their words alone; the first are those that every template takes."""
    yield [[_user(text)] for text in _TURNS]
    for switch in _SWITCHES:
        system = {"role": "system", "content": switch}
        yield [[system, _user(text)] for text in _TURNS]
        yield [[_user(f"{switch} {text}")] for text in _TURNS]
    function = {"name": "look", "arguments": {"at": "it"}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look"}
    yield [[_user("Look"), asked, result | {"content": text}] for text in _TURNS]


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _before_reply(tokenizer, talks: list[list[dict]]) -> tuple[int, ...]:
    """The ids that generation adds to each of the talks. Behind a tool's result it may add none,
    since the turn goes on: then those that all the prompts end in."""
    prompts, added = [], []
    for messages in talks:
        without, prompt = (
            encode(tokenizer, rendered(tokenizer, messages, generation))
            for generation in (False, True)
        )
        prompts.append(prompt)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(without, prompt, strict=False))
        added.append(len(prompt) - len(list(same)))
    length = min(added)
    if not length and talks[0][-1]["role"] == "tool":
        length = min(map(len, prompts))
    while length and len({tuple(ids[-length:]) for ids in prompts}) > 1:
        length -= 1
    return tuple(prompts[0][len(prompts[0]) - length :])


def check_text(shard: Shard, speech: Speech) -> Iterator[tuple[str, str | None]]:
    """(check, what is wrong or None) of a shard whose offsets, replies and tokens are right."""
    first, last, row = _replies(shard)
    yield "reply ends", _wrong_end(shard, speech, first, last, row)
    if speech.prompts:
        yield "reply begins", _wrong_begin(shard, speech, first, row)


def _replies(shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the first and of the last token of each reply, and its row: [r] each."""
    said, bounds = shard["reply"].long(), shard["offsets"]
    before, after = said.roll(1), said.roll(-1)
    before[bounds[:-1]] = after[bounds[1:] - 1] = 0
    first = ((said > 0) & (said != before)).nonzero().flatten()
    last = ((said > 0) & (said != after)).nonzero().flatten()
    row = shard.row_of[first]
    plain = torch.tensor([f["temperature"] is None and f["finish"] is None for f in shard.facts])
    text = plain[row] & (first == bounds[row] + 1) & (last == bounds[row + 1] - 1)
    return first[~text], last[~text], row[~text]


def _wrong_end(
    shard: Shard, speech: Speech, first: Tensor, last: Tensor, row: Tensor
) -> str | None:
    """A reply ends in a stop id, unless it was cut off at the end of its row, and has no other."""
    stops = torch.isin(shard["tokens"], torch.tensor(speech.stop_ids, dtype=torch.int32))
    cut = torch.tensor([f["truncated"] or f["finish"] not in ("stop", None) for f in shard.facts])
    cut_off = cut[row] & (last == shard["offsets"][row + 1] - 1)
    unended = last[~stops[last] & ~cut_off]
    inside = stops & (shard["reply"] > 0)
    inside[last] = False
    # Plain texts may have any token anywhere.
    of_talk = torch.zeros(len(shard.facts), dtype=torch.bool)
    of_talk[row] = True
    inside &= of_talk[shard.row_of]
    return shard.at(unended, "a reply ends here without an end-of-turn token") or shard.at(
        inside.nonzero().flatten(), "an end-of-turn token inside a reply"
    )


def _wrong_begin(shard: Shard, speech: Speech, first: Tensor, row: Tensor) -> str | None:
    """What stands before a reply is the generation prompt; by its ids or, where the tokenizer made
    others of it beside the user's words, by its text."""
    tokens, begin = shard["tokens"], shard["offsets"][row]
    right = torch.zeros_like(first, dtype=torch.bool)
    for prompt in speech.prompts:
        places = first[:, None] - torch.arange(len(prompt), 0, -1)
        same = tokens[places.clamp(min=0)] == torch.tensor(prompt, dtype=torch.int32)
        right |= same.all(1) & (places[:, 0] >= begin)
    texts = tuple(text.lstrip() for text in speech.texts)
    room = max(map(len, speech.prompts)) + _ROOM
    for place, start in zip(first[~right].tolist(), begin[~right].tolist(), strict=True):
        before = tokens[max(start, place - room) : place].tolist()
        if not speech.tokenizer.decode(before).endswith(texts):
            what = "a reply begins here, not behind the template's generation prompt"
            return shard.at(torch.tensor([place]), what)
    return None
