"""Chat templates in the styles of the usual model families, and what each writes as a reply.

Each is written here from what the family's prompts look like. `reply(content)` is the text that the
model itself writes after its generation prompt, end-of-turn token included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SPECIAL = (
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|start_header|>",
    "<|end_header|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
)


@dataclass(frozen=True)
class Style:
    """system: whether it takes a system turn."""

    template: str
    end: str
    reply: Callable[[str], str]
    system: bool = True


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The end of a reply is the end of the text; the system turn hides in the first user turn.
LLAMA_2 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + ns.system + m.content.strip() + "
    "' [/INST]' }}{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
    "' [/INST]' }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% if loop.first %}{{ '<|begin|>' }}{% endif %}"
    "{{ '<|start_header|>' + m.role + '<|end_header|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('no system turn') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Its role tokens swallow the white space behind them.
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Thinking stays where no user turn follows, and is dropped from older turns.
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thinking = m.reasoning_content or '' %}"
    "{% if not thinking and '</think>' in content %}"
    "{% set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thinking) %}"
    "{{ '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ content.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same, and it always thinks: the block is opened by the generation prompt.
THINKING = QWEN_3.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
)
# The generation prompt opens the block, and what was thought is never shown again.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}"
    "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + ' ' }}"
    "{{ call.function.arguments | tojson }}{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

STYLES = {
    "chatml": Style(CHATML, "<|im_end|>", lambda text: text + "<|im_end|>"),
    "llama-2": Style(LLAMA_2, "</s>", lambda text: f" {text.strip()} </s>"),
    "mistral": Style(MISTRAL, "</s>", lambda text: text + "</s>", system=False),
    "llama-3": Style(LLAMA_3, "<|eot|>", lambda text: text.strip() + "<|eot|>"),
    "gemma": Style(GEMMA, "<end_of_turn>", lambda text: text.strip() + "<end_of_turn>", False),
    "phi": Style(PHI, "<|im_end|>", lambda text: text.lstrip() + "<|im_end|>"),
}
