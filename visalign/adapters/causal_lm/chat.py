# SPDX-License-Identifier: Apache-2.0
"""`PromptEncoder` under its former address; it is at home in `visalign.text.chat`."""

from visalign.text.chat import PromptEncoder as PromptEncoder
