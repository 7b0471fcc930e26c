# SPDX-License-Identifier: Apache-2.0
"""`visalign train-reward` and its configurations: data, judges, measurement, card. It needs `shared`."""
