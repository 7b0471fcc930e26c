# SPDX-License-Identifier: Apache-2.0
"""Parts of jobs: builders, sections of configurations, run folders, resuming.

It needs the wings; it knows no job.
"""
