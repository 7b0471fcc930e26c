# SPDX-License-Identifier: Apache-2.0
"""What several jobs share: building parts, sections of configurations, the run folder, resuming.

It needs the wings; it knows no job.
"""
