"""Which function draws which result in which form: the table that `mpkit.common.display.draw` uses.

A result with a "chart" is drawn from it in every form that it has no function of its own for (`charted`).
"""

RESULTS = "mpkit.views.results"

RENDERERS = {
    "Timeline": {
        "text": "mpkit.views.timeline.text:text",
        "svg": "mpkit.views.timeline.svg:svg",
        "html": "mpkit.views.page.html:html",
        "perfetto": "mpkit.views.timeline.perfetto:perfetto",
        "widget": "mpkit.views.timeline.widget:TimelineView",
        "bundle": "mpkit.views.timeline.svg:static_bundle",
    },
    "CriticalPath": {
        "text": "mpkit.views.timeline.critical_path:critical_text",
        "svg": "mpkit.views.timeline.critical_path:critical_svg",
        "widget": "mpkit.views.timeline.widget:show_path",
    },
    "Diagnosis": {
        "text": "mpkit.views.timeline.diagnosis:diagnosis_text",
        "svg": "mpkit.views.timeline.diagnosis:diagnosis_svg",
        "html": "mpkit.views.timeline.diagnosis:diagnosis_html",
        "panel": "mpkit.views.timeline.diagnosis:diagnosis_panel",
    },
    "Cluster": {"waiting": "mpkit.views.dashboard.widget:show_waiting"},
    "Execution": {"widget": "mpkit.views.dashboard.widget:show_run"},
    "Comparison": {
        "text": f"{RESULTS}.comparison:comparison_text",
        "svg": f"{RESULTS}.comparison:comparison_svg",
        "chart": f"{RESULTS}.steps:causes",
        "widget": f"{RESULTS}.comparison:comparison_view",
    },
    "WhatIf": {
        "text": f"{RESULTS}.comparison:what_if_text",
        "svg": f"{RESULTS}.comparison:what_if_svg",
        "widget": f"{RESULTS}.comparison:what_if_view",
    },
    "CommVolume": {"text": f"{RESULTS}.tables:volume_text", "html": f"{RESULTS}.tables:volume_html"},
    "TokenRoutes": {"text": f"{RESULTS}.routes:routes_text", "svg": f"{RESULTS}.routes:routes_svg"},
    "Placement": {
        "text": "mpkit.views.placement.text:placement_text",
        "svg": "mpkit.views.placement.svg:placement_svg",
    },
    "CheckupReport": {
        "text": f"{RESULTS}.checkup:report_text",
        "terminal": f"{RESULTS}.checkup:print_report",
    },
    # ---- charts
    "Chart": {
        "text": "mpkit.views.chart.chart:chart_text",
        "svg": "mpkit.views.chart.svg:chart_svg",
        "figure": "mpkit.views.chart.figure:chart_figure",
    },
    "BubbleCurve": {"chart": f"{RESULTS}.steps:bubble_curve", "text": f"{RESULTS}.steps:bubble_curve_text"},
    "Scaling": {"chart": f"{RESULTS}.steps:scaling_chart"},
    "Estimate": {"chart": f"{RESULTS}.steps:estimate_chart"},
    "Advice": {
        "chart": f"{RESULTS}.steps:advice_chart",
        "table": f"{RESULTS}.tables:advice_table",
        "parts": f"{RESULTS}.tables:advice_parts",
    },
    "MemoryByPlan": {"chart": "mpkit.views.memory.charts:by_plan"},
    "MemoryByStrategy": {"chart": "mpkit.views.memory.charts:by_strategy"},
    "CommMatrix": {"chart": f"{RESULTS}.ranks:traffic", "text": f"{RESULTS}.ranks:traffic_text"},
    "AttentionWork": {"chart": f"{RESULTS}.ranks:attention", "text": f"{RESULTS}.ranks:attention_text"},
    "ExpertLoad": {"chart": f"{RESULTS}.ranks:load", "text": f"{RESULTS}.ranks:load_text"},
    "ExpertBalance": {"chart": f"{RESULTS}.ranks:balance", "text": f"{RESULTS}.ranks:balance_text"},
}
"""By the name of a result's class and the form: the renderer's module and name."""
