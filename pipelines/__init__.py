# SPDX-License-Identifier: Apache-2.0
"""End-to-end jobs and the command line: they alone put the wings together; no algorithm belongs here."""
