# SPDX-License-Identifier: Apache-2.0
"""Pictures of recorded runs: a page on localhost, the terminal, and a report. Reads `telemetry/records.py`'s files."""
