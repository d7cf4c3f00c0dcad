"""What commands print alike."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def print_json(content: Any) -> None:
    """One line on standard output; escaped where that is not UTF-8, so that nothing is lost."""
    is_utf8 = getattr(sys.stdout, "encoding", "").lower().replace("-", "") == "utf8"
    click.echo(json.dumps(content, ensure_ascii=not is_utf8))
