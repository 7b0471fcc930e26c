# SPDX-License-Identifier: Apache-2.0
"""Images, as policies that see and judges that see share them: pixels, resizing, patches, positions.

It needs torch, numpy and pillow; no model and no judge comes in.
"""
