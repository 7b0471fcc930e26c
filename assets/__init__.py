# SPDX-License-Identifier: Apache-2.0
"""The small trained models of the embedded default, in the standard formats of their libraries."""
