# SPDX-License-Identifier: Apache-2.0
"""`visalign probe-reward`: what moves a judge that should not.

It needs `shared`; the catalogue of changes belongs to `visalign.evaluation.probes`.
"""
