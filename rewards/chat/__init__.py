# SPDX-License-Identifier: Apache-2.0
"""Judges that ask a chat model: a served one (OpenAI-compatible API), or one loaded in this process."""
