"""Which function draws which result in which form: the table that `mpkit.common.display.draw` uses."""

from __future__ import annotations

__all__ = ["RENDERERS"]

RENDERERS = {
    "Timeline": {
        "text": "mpkit.views.timeline.text:text",
        "svg": "mpkit.views.timeline.svg:svg",
        "html": "mpkit.views.page.html:html",
        "perfetto": "mpkit.views.timeline.perfetto:perfetto",
        "widget": "mpkit.views.timeline.widget:TimelineView",
        "bundle": "mpkit.views.timeline.fallback:static_bundle",
    },
    "CriticalPath": {
        "text": "mpkit.views.timeline.critical_path:critical_text",
        "svg": "mpkit.views.timeline.critical_path:critical_svg",
        "html": "mpkit.views.timeline.critical_path:critical_html",
        "widget": "mpkit.views.timeline.widget:show_path",
    },
    "Diagnosis": {
        "text": "mpkit.views.timeline.diagnosis:diagnosis_text",
        "svg": "mpkit.views.timeline.diagnosis:diagnosis_svg",
        "html": "mpkit.views.timeline.diagnosis:diagnosis_html",
        "panel": "mpkit.views.timeline.diagnosis:diagnosis_panel",
    },
    "Run": {"widget": "mpkit.views.dashboard.widget:show_run"},
    "RunList": {
        "text": "mpkit.views.comparison.run_list:run_list_text",
        "widget": "mpkit.views.comparison.run_list:run_list_view",
    },
    "WatchedRun": {"widget": "mpkit.views.dashboard.widget:show_run"},
    "CommMatrix": {
        "text": "mpkit.views.traffic.text:traffic_text",
        "svg": "mpkit.views.traffic.svg:traffic_svg",
        "chart": "mpkit.views.traffic.chart:traffic_figure",
    },
    "CommVolume": {
        "text": "mpkit.views.traffic.volume:volume_text",
        "html": "mpkit.views.traffic.volume:volume_html",
    },
    "AttentionWork": {
        "text": "mpkit.views.sequences.work:work_text",
        "svg": "mpkit.views.sequences.work:work_svg",
    },
    "ExpertLoad": {
        "text": "mpkit.views.experts.load:load_text",
        "svg": "mpkit.views.experts.load:load_svg",
    },
    "ExpertBalance": {
        "text": "mpkit.views.experts.balance:balance_text",
        "svg": "mpkit.views.experts.balance:balance_svg",
    },
    "TokenRoutes": {
        "text": "mpkit.views.experts.routes:routes_text",
        "svg": "mpkit.views.experts.routes:routes_svg",
    },
    "Placement": {
        "text": "mpkit.views.placement.text:placement_text",
        "svg": "mpkit.views.placement.svg:placement_svg",
    },
    "Comparison": {
        "text": "mpkit.views.comparison.text:comparison_text",
        "svg": "mpkit.views.comparison.svg:comparison_svg",
        "chart": "mpkit.views.comparison.chart:comparison_figure",
        "widget": "mpkit.views.comparison.chart:comparison_view",
    },
    "Chart": {
        "text": "mpkit.views.comparison.table_chart:chart_text",
        "chart": "mpkit.views.comparison.table_chart:chart_figure",
    },
    "BubbleCurve": {
        "text": "mpkit.views.comparison.bubble_curve:bubble_curve_text",
        "svg": "mpkit.views.comparison.bubble_curve:bubble_curve_svg",
    },
    "MemoryByPlan": {
        "text": "mpkit.views.memory.by_plan:by_plan_text",
        "svg": "mpkit.views.memory.by_plan:by_plan_svg",
    },
    "WhatIf": {
        "text": "mpkit.views.comparison.what_if:what_if_text",
        "svg": "mpkit.views.comparison.what_if:what_if_svg",
        "widget": "mpkit.views.comparison.what_if:what_if_view",
    },
    "CheckupReport": {
        "text": "mpkit.views.commands.doctor:report_text",
        "html": "mpkit.views.commands.doctor:report_html",
        "terminal": "mpkit.views.commands.doctor:print_report",
    },
    "Estimate": {
        "svg": "mpkit.views.comparison.estimate:estimate_svg",
    },
    "Advice": {
        "chart": "mpkit.views.comparison.advice:advice_figure",
        "table": "mpkit.views.comparison.advice:advice_table",
        "parts": "mpkit.views.comparison.advice:advice_parts",
    },
    "Scaling": {"chart": "mpkit.views.comparison.scaling:scaling_figure"},
    "MemoryByStrategy": {
        "svg": "mpkit.views.memory.strategies_svg:strategies_svg",
        "chart": "mpkit.views.memory.strategies:strategies_figure",
    },
    "Matrices": {"svg": "mpkit.views.drawing.matrices:picture"},
}
"""By the name of a result's class and the form: the renderer's module and name."""
