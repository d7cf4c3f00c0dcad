"""Whatever proposes tokens. Importing it switches ONNX Runtime's telemetry off, unless the user has set it."""

from __future__ import annotations

import os

# Its GPU wheel otherwise notes every import in the home folder, to be sent to its makers. Read when it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
