"""`spectrain export`."""

from __future__ import annotations

from typing import Annotated

import typer

from spectrain.commands import options, running
from spectrain.commands.options import ConfigFile, Json, Overrides, Overwrite, option

Run = Annotated[str, typer.Argument(help="Training run, or the folder of a head.", metavar="RUN")]
Format = option(str, "Whose format; see above.", metavar="NAME")
Out = options.out("RUN/export/NAME")
Target = option(str, options.TARGET, metavar="NAME", default="the head's own")
Dtype = option(
    str,
    "Number type of the tensors; auto: as they are stored.",
    "--dtype",
    metavar="auto|float32|bfloat16|float16",
    default="auto",
)
Files = option(
    str,
    "Copy or link files of the target that belong to the export.",
    metavar="copy|link",
    default="copy",
)
BaseModel = option(
    str, "The target as others call it.", metavar="NAME", default="its hub id or folder"
)
License = option(str, "Licence id, as model hubs know it.", metavar="ID", default="other")
Alpha = option(
    str,
    "Measured numbers: what eval-alpha --json wrote.",
    metavar="FILE",
    default="RUN/eval-alpha.json",
)
Push = option(
    str, "Upload to the model hub; private, unless --set private=false.", metavar="OWNER/NAME"
)


def export(
    ctx: typer.Context,
    run: Run,
    format: Format = None,
    out: Out = None,
    target: Target = None,
    dtype: Dtype = None,
    files: Files = None,
    base_model: BaseModel = None,
    license: License = None,
    alpha: Alpha = None,
    push: Push = None,
    overwrite: Overwrite = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Write a head in the format of an engine, with a page that says how to run it.

    What is written is read back and compared first; what a format cannot express
    is refused with the reason.

    \b
    Formats:
      spectrain             our own: what generate loads
      eagle                 EAGLE's own layout, versions 1, 2 and 3
      vllm, sglang, trtllm  the same, as each of these engines wants it
      speculators           EAGLE-3 in one file, for vLLM
      medusa                Medusa's own layout
      mtp-deepseek, mtp-mimo, mtp-qwen3next, mtp-transformers
                            MTP layers, stitched into a copy of the target
      hf                    a draft model, for transformers
    Examples:
      spectrain export runs/train --format vllm
      spectrain export runs/train --format spectrain --alpha alpha.json \\
          --license apache-2.0 --push me/my-draft-head
    """
    running.run("export", "export", "ExportConfig", ctx.params)
