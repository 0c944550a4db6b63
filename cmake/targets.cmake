# fp8kvd_library(name HDRS … SRCS … PUBLIC_DEPS … PRIVATE_DEPS … VISIBLE_TO …)
#   One folder, one library: target fp8kvd_<name>, alias fp8kvd::<name>. PUBLIC_DEPS are seen in its
#   headers. VISIBLE_TO names the targets of ours that may link it ("*": all).
# fp8kvd_binary(name SRCS … DEPS …)   an executable in bin/.
# fp8kvd_test(name [SERIAL] SRCS … DEPS … SKIP_UNDER …)   a GoogleTest binary and a ctest of that
#   name. SERIAL: nothing runs beside it (it measures time). SKIP_UNDER: not built in asan or tsan.
# fp8kvd_python_test(name [SERIAL] SCRIPT file.py PYTHON … NEEDS … SKIP_UNDER …)   a ctest that runs
#   a Python program of the source tree; NEEDS are the targets that it starts, found in
#   FP8KVD_BIN_DIR. PYTHON: another than that of build/venv.
#   A test of another kind says which targets tests/run builds for it: LABELS needs=TARGET.
#   A test's time limit stands in tests/budget.txt; one without a line there does not configure.
# fp8kvd_check_visibility()           after all folders: fails on an edge that VISIBLE_TO refuses.

set(FP8KVD_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^12\\.")
  list(APPEND FP8KVD_WARNINGS -Werror)  # of the compilers that CI has; others warn of more
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^14\\.")
  list(APPEND FP8KVD_WARNINGS -Werror)
endif()

# Sanitizer builds compile the sources of a target joined: most of their time went by over headers.
# The release build still shows what a source forgets to include. Not with a compiler cache, which
# keeps single sources. One that cannot be joined has the property SKIP_UNITY_BUILD_INCLUSION.
if(FP8KVD_SANITIZE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(FP8KVD_JOINS ON)
endif()

function(_fp8kvd_flags target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${FP8KVD_WARNINGS}>)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>)
  if(FP8KVD_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FP8KVD_SANITIZE}
      -fno-omit-frame-pointer -fno-sanitize-recover=all>)
    target_link_options(${target} PUBLIC -fsanitize=${FP8KVD_SANITIZE})
  endif()
  if(FP8KVD_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
  if(FP8KVD_JOINS)
    set_property(TARGET ${target} PROPERTY UNITY_BUILD ON)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # takes a joined source for a header
      target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
    endif()
  endif()
endfunction()

function(fp8kvd_library name)
  cmake_parse_arguments(A "" "" "HDRS;SRCS;PUBLIC_DEPS;PRIVATE_DEPS;VISIBLE_TO" ${ARGN})
  if(A_UNPARSED_ARGUMENTS OR NOT A_VISIBLE_TO)
    message(FATAL_ERROR "${name}: VISIBLE_TO is required; not understood: ${A_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT A_SRCS)  # a header that nothing compiles is never checked: compile each alone
    foreach(hdr IN LISTS A_HDRS)
      string(MAKE_C_IDENTIFIER ${hdr} id)
      set(probe ${CMAKE_CURRENT_BINARY_DIR}/${name}_${id}.cc)
      file(CONFIGURE OUTPUT ${probe} CONTENT "#include \"${CMAKE_CURRENT_SOURCE_DIR}/${hdr}\"\n")
      list(APPEND A_SRCS ${probe})
    endforeach()
  endif()
  add_library(fp8kvd_${name} STATIC ${A_SRCS} ${A_HDRS})
  add_library(fp8kvd::${name} ALIAS fp8kvd_${name})
  _fp8kvd_flags(fp8kvd_${name})
  target_link_libraries(fp8kvd_${name} PUBLIC ${A_PUBLIC_DEPS} PRIVATE ${A_PRIVATE_DEPS})
  set_property(GLOBAL PROPERTY FP8KVD_VISIBLE_${name} ${A_VISIBLE_TO})
  set_property(GLOBAL APPEND PROPERTY FP8KVD_TARGETS ${name})
  set_property(GLOBAL PROPERTY FP8KVD_DEPS_${name} ${A_PUBLIC_DEPS} ${A_PRIVATE_DEPS})
endfunction()

function(fp8kvd_binary name)
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${A_SRCS})
  _fp8kvd_flags(${name})
  target_link_libraries(${name} PRIVATE ${A_DEPS})
  set_property(GLOBAL APPEND PROPERTY FP8KVD_TARGETS ${name})
  set_property(GLOBAL PROPERTY FP8KVD_DEPS_${name} ${A_DEPS})
endfunction()

# Python for tests and generated stubs: the environment that tests/run makes, else the system's.
find_program(FP8KVD_PYTHON python3 HINTS ${CMAKE_SOURCE_DIR}/build/venv/bin NO_DEFAULT_PATH)
find_program(FP8KVD_PYTHON python3 REQUIRED)

# Instrumented code is slower: budgets are for the release build and grow by these factors.
set(FP8KVD_BUDGET_SCALE 1 CACHE STRING "Whole number by which every test's budget grows")
set(FP8KVD_BUDGET_FACTOR 1)
set(FP8KVD_BUILD_KIND release)
if(FP8KVD_SANITIZE MATCHES "thread")
  set(FP8KVD_BUDGET_FACTOR 10)
  set(FP8KVD_BUILD_KIND tsan)
elseif(FP8KVD_SANITIZE)
  set(FP8KVD_BUDGET_FACTOR 5)
  set(FP8KVD_BUILD_KIND asan)
endif()

# fp8kvd_budget(name): sets a test's time limit, and so its place in the order, from its line in
# tests/budget.txt.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/budget.txt)
function(fp8kvd_budget name)
  file(STRINGS ${CMAKE_SOURCE_DIR}/tests/budget.txt line REGEX "^${name} +[0-9]+")
  if(NOT line)
    message(FATAL_ERROR "tests/budget.txt has no line for ${name}")
  endif()
  string(REGEX REPLACE "^${name} +([0-9]+).*" "\\1" seconds "${line}")
  math(EXPR seconds "${seconds} * ${FP8KVD_BUDGET_FACTOR} * ${FP8KVD_BUDGET_SCALE}")
  # The longest begin first, so that none of them runs at the end beside an idle core.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${seconds} COST ${seconds})
endfunction()

set(FP8KVD_TEST_FLAGS)
if(FP8KVD_SANITIZE)  # half of an instrumented build was optimizing the tests themselves
  set(FP8KVD_TEST_FLAGS $<$<COMPILE_LANGUAGE:CXX>:-O0>)
endif()

function(fp8kvd_test name)
  cmake_parse_arguments(A "SERIAL" "" "SRCS;DEPS;SKIP_UNDER" ${ARGN})
  if(FP8KVD_BUILD_KIND IN_LIST A_SKIP_UNDER)
    return()
  endif()
  fp8kvd_binary(${name} SRCS ${A_SRCS} DEPS ${A_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  set_property(GLOBAL PROPERTY FP8KVD_VISIBLE_AS_${name} tests)
  target_compile_options(${name} PRIVATE ${FP8KVD_TEST_FLAGS})
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  fp8kvd_budget(${name})
  if(A_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

function(fp8kvd_python_test name)
  cmake_parse_arguments(A "SERIAL" "SCRIPT;PYTHON" "NEEDS;SKIP_UNDER" ${ARGN})
  if(FP8KVD_BUILD_KIND IN_LIST A_SKIP_UNDER)
    return()
  endif()
  if(NOT A_PYTHON)
    set(A_PYTHON ${FP8KVD_PYTHON})
  endif()
  list(TRANSFORM A_NEEDS PREPEND "needs=")
  add_test(NAME ${name} COMMAND ${A_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/${A_SCRIPT}
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  fp8kvd_budget(${name})
  set(environment FP8KVD_BIN_DIR=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
    FP8KVD_BUILD_DIR=${CMAKE_BINARY_DIR})
  set_tests_properties(${name} PROPERTIES
    ENVIRONMENT "${environment}"
    LABELS "script;${A_NEEDS}")
  if(A_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

function(fp8kvd_check_visibility)
  get_property(targets GLOBAL PROPERTY FP8KVD_TARGETS)
  foreach(target IN LISTS targets)
    get_property(deps GLOBAL PROPERTY FP8KVD_DEPS_${target})
    get_property(as GLOBAL PROPERTY FP8KVD_VISIBLE_AS_${target})  # tests are one name together
    foreach(dep IN LISTS deps)
      if(dep MATCHES "^fp8kvd::(.*)$")
        get_property(visible GLOBAL PROPERTY FP8KVD_VISIBLE_${CMAKE_MATCH_1})
        if(NOT "*" IN_LIST visible AND NOT target IN_LIST visible AND NOT "${as}" IN_LIST visible)
          message(FATAL_ERROR "${target} may not use ${dep}: visible to ${visible}")
        endif()
      endif()
    endforeach()
  endforeach()
endfunction()
