"""Metric families under one prefix and one set of labels, as the metrics library wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from noria.observe.histogram import Histogram


class Families:
    """Makes families; counters gain `_total`. `labels` are those that every series has."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._names, self._values = tuple(labels), tuple(labels.values())

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self._one(GaugeMetricFamily(self._prefix + name, text, labels=self._names), value)

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self._one(CounterMetricFamily(self._prefix + name, text, labels=self._names), value)

    def gauges(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        """One series for each key of `values`, which is the value of `label`."""
        return self._each(GaugeMetricFamily(self._prefix + name, text, labels=(*self._names, label)), values)

    def counters(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        return self._each(CounterMetricFamily(self._prefix + name, text, labels=(*self._names, label)), values)

    def info(self, name: str, text: str, facts: Mapping[str, object]) -> Metric:
        """A gauge that is always 1, whose labels are what it says."""
        family = GaugeMetricFamily(self._prefix + name, text, labels=(*self._names, *facts))
        family.add_metric((*self._values, *map(str, facts.values())), 1)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family = HistogramMetricFamily(self._prefix + name, text, labels=self._names)
        family.add_metric(self._values, buckets=buckets, sum_value=histogram.sum)
        return family

    def _one(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(self._values, value)
        return family

    def _each(self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> Metric:
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family
