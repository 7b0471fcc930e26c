# SPDX-License-Identifier: Apache-2.0
"""One YAML per runnable job."""
