# SPDX-License-Identifier: Apache-2.0
"""Parts of all jobs: builders, sections of configurations, run folders, resuming. It knows no job."""
