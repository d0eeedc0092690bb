/* Moves the time of day of a program that loads this before its C library (LD_PRELOAD): by as many seconds as the file
   CLOCK_OFFSET_FILE holds as a binary int64, which may change at any moment. Monotonic clocks are left alone.
   The kernel does not know the moved time, so deadlines that it compares with its own are moved back: a wait that ends
   at a time of day (gloo's) would otherwise end at once, and its caller would wait again without end and without pause.
   libfaketime does the same, but makes clock_nanosleep fail, by which Python sleeps. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long offset(void) {
    static volatile long long *seconds;
    if (!seconds) {
        const char *path = getenv("CLOCK_OFFSET_FILE");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *place = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long long), PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (place == MAP_FAILED) return 0;
        seconds = place;
    }
    return *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*volatile real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec deadline = *until;
    const time_t longest_uptime = 1000000000; /* a larger number of seconds is a time of day, not a monotonic time */
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (deadline.tv_sec < longest_uptime) return real(condition, mutex, until);
    struct timespec soon;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &soon);
    soon.tv_sec += 1;
    deadline.tv_sec -= offset();
    if (deadline.tv_sec < soon.tv_sec) return real(condition, mutex, &deadline);
    int ended = real(condition, mutex, &soon);
    return ended == ETIMEDOUT ? 0 : ended; /* woken without a cause, which may happen: the caller looks at the time */
}
