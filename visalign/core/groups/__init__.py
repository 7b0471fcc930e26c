# SPDX-License-Identifier: Apache-2.0
"""Labels, moments and statistics of groups. Imports torch alone."""
