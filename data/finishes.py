"""Why a reply ended, in two words where that is known: everybody has names of their own for it."""

from __future__ import annotations

_NAMES = {
    "length": "length max_length max_tokens max_new_tokens max_output_tokens token_limit "
    "model_length model_context_window_exceeded limit",
    "stop": "stop stopped stop_token stop_sequence eos eos_token end end_turn end_of_turn "
    "end_of_text endoftext complete completed finish finished done",
}
_FINISH_OF = {name: finish for finish, names in _NAMES.items() for name in names.split()}
CALLS = ("tool_calls", "tool_call", "tool_use", "function_call")
REFUSED = "request-refused"  # there is no reply; no server's own name has a hyphen here
WHOLE = ("stop", "length")  # the target's words, to their end or to a length
_LONGEST = 40  # characters of a name; it goes into reports


def finish_of(given: str) -> str:
    """ "length" or "stop" for any of their names, else the name itself in lower case."""
    name = "_".join(given.lower().replace("-", " ").replace("_", " ").split())
    return _FINISH_OF.get(name, name[:_LONGEST])
