# SPDX-License-Identifier: Apache-2.0
"""Labels, moments and statistics of groups. It needs torch; nothing else of the package."""
