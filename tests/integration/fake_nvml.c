/* A libnvidia-ml.so.1 with one GPU, for testing the probe's NVML calls where there is none. FAKE_NVML=hang: the first call never returns. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } rates_t;
typedef struct { unsigned pid; unsigned long long mem; unsigned gi, ci; } info_t;
typedef struct { unsigned pid; unsigned long long when; unsigned sm, mem, enc, dec; } use_t;
static int mode(const char *word) { const char *m = getenv("FAKE_NVML"); return m && !strcmp(m, word); }

int nvmlInit_v2(void) { if (mode("hang")) for (;;) pause(); return mode("broken") ? 9 : 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Driver Not Loaded"; }
int nvmlSystemGetDriverVersion(char *b, unsigned n) { strncpy(b, "570.86", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 12080; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { (void)i; *h = (void *)0x10; return mode("lost") ? 15 : 0; }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) { (void)h; strncpy(b, "GPU-7", n); return 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) { (void)h; strncpy(b, "H200", n); return 0; }
int nvmlDeviceGetUtilizationRates(void *h, rates_t *r) { (void)h; r->gpu = 100; r->memory = 1; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { (void)h; m->total = 1000; m->free = 400; m->used = 600; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *v) { (void)h; *v = 121500; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *v) { (void)h; *v = 700000; return 0; }
int nvmlDeviceGetClockInfo(void *h, unsigned t, unsigned *v) { (void)h; *v = t == 1 ? 345 : 3201; return 0; }
int nvmlDeviceGetMaxClockInfo(void *h, unsigned t, unsigned *v) { (void)h; *v = t == 1 ? 1980 : 3201; return 0; }
int nvmlDeviceGetTemperature(void *h, unsigned s, unsigned *v) { (void)h; (void)s; *v = 31; return 0; }
int nvmlDeviceGetPerformanceState(void *h, unsigned *v) { (void)h; *v = 0; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *v) { (void)h; *v = 0x44; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *v) { (void)h; *v = 5000000000ULL; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *h, unsigned *v) { (void)h; *v = 5; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *h, unsigned *v) { (void)h; *v = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *h, unsigned *v) { (void)h; *v = 5; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *h, unsigned *v) { (void)h; *v = 16; return 0; }
int nvmlDeviceGetPcieThroughput(void *h, unsigned c, unsigned *v) { (void)h; *v = c ? 20 : 10; return 0; }
int nvmlDeviceGetTotalEccErrors(void *h, unsigned t, unsigned c, unsigned long long *v) { (void)h; (void)t; (void)c; *v = 2; return 0; }
int nvmlDeviceGetRemappedRows(void *h, unsigned *a, unsigned *b, unsigned *c, unsigned *d) { (void)h; *a = 0; *b = 1; *c = 1; *d = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, info_t *p) {
    (void)h; if (*n < 1) return 7; *n = 1; p[0].pid = atoi(getenv("FAKE_PID")); p[0].mem = 600; return 0;
}
int nvmlDeviceGetProcessUtilization(void *h, use_t *u, unsigned *n, unsigned long long since) {
    (void)h; (void)since; if (*n < 1) return 7; *n = 1; u[0].pid = atoi(getenv("FAKE_PID")); u[0].sm = 88; return 0;
}
